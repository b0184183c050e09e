"""Group-wise integer quantization of weight matrices, and the two planes of a linear layer.

A row of W [N, K] is cut into groups of `group_size` weights. Each group has a scale s > 0 (float16) and a zero-point z,
and a weight w is kept as the code q = clip(round(w / s) + z, 0, 2^bits - 1); its dequantized value is (q - z) * s
(Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
equation 1).

The *base* plane quantizes W to 4 bits. The *residual* plane quantizes what is left, W - dequantized(base), to 4 bits
with scales of its own. INT4 uses the base alone, INT8 the sum of both: one copy of the weights serves two precisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import SchemeError

Float32 = NDArray[np.float32]
Float16 = NDArray[np.float16]
UInt8 = NDArray[np.uint8]

SMALLEST_SCALE = float(np.finfo(np.float16).tiny)
"""Scales are never denormal in float16: the engines may flush those to zero."""

LARGEST_SCALE = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Codes, scales and zero-points of one matrix [N, K] in G groups a row."""

    codes: UInt8  # [N, K], one code a byte
    scales: Float16  # [N, G]
    zero_points: UInt8  # [N, G]

    def dequantized(self) -> Float32:
        """The matrix [N, K] that the engines compute with."""
        rows, groups = self.scales.shape
        codes = self.codes.reshape(rows, groups, -1).astype(np.float32)
        codes -= self.zero_points[:, :, None]
        codes *= self.scales[:, :, None].astype(np.float32)
        return codes.reshape(rows, -1)


def group_length(columns: int, group_size: int) -> int:
    """Weights in one group of a row of `columns`; a `group_size` of 0 means the whole row.

    Raises SchemeError when groups do not divide the row.
    """
    length = group_size or columns
    if columns % length:
        fitting = [size for size in (32, 64, 128) if columns % size == 0]
        raise SchemeError(
            f"group size {group_size} does not divide rows of {columns}; "
            f"allowed: {', '.join(map(str, [*fitting, '0 (per channel)']))}"
        )
    return length


def quantize(weights: Float32, bits: int, group_size: int, symmetric: bool) -> QuantizedMatrix:
    """Rounds `weights` [N, K] to codes of `bits` (at most 8) bits; each group spans the range of its weights.

    Symmetric groups have their zero-point in the middle of the code range. Raises SchemeError when groups do not
    divide K or a scale does not fit float16.
    """
    rows, columns = weights.shape
    grouped = weights.reshape(rows, -1, group_length(columns, group_size))
    scales, zero_points = _symmetric_range(grouped, bits) if symmetric else _asymmetric_range(grouped, bits)
    return rounded(weights, scales, zero_points, bits)


def rounded(weights: Float32, scales: Float16, zero_points: UInt8, bits: int) -> QuantizedMatrix:
    """`weights` [N, K] as the nearest codes of `bits` bits that given scales and zero-points [N, G] have for them."""
    rows, groups = scales.shape
    codes = weights.reshape(rows, groups, -1) / scales[:, :, None].astype(np.float32)
    np.rint(codes, out=codes)
    codes += zero_points[:, :, None]
    np.clip(codes, 0, 2**bits - 1, out=codes)
    return QuantizedMatrix(codes.astype(np.uint8).reshape(rows, -1), scales, zero_points)


def quantize_planes(weights: Float32, group_size: int, symmetric: bool) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    """The base and the residual plane of `weights` [N, K], 4 bits each."""
    base = quantize(weights, 4, group_size, symmetric)
    return base, quantize(weights - base.dequantized(), 4, group_size, symmetric)


def _asymmetric_range(grouped: Float32, bits: int) -> tuple[Float16, UInt8]:
    top = 2**bits - 1
    low = np.minimum(grouped.min(axis=2), 0)
    high = np.maximum(grouped.max(axis=2), 0)
    scales = _as_scales((high - low) / top)
    zero_points = np.clip(np.rint(-low / scales.astype(np.float32)), 0, top)
    return scales, zero_points.astype(np.uint8)


def _symmetric_range(grouped: Float32, bits: int) -> tuple[Float16, UInt8]:
    middle = 2 ** (bits - 1)
    scales = _as_scales(np.abs(grouped).max(axis=2) / (middle - 1))
    return scales, np.full(scales.shape, middle, np.uint8)


def _as_scales(scales: NDArray[Any]) -> Float16:
    if scales.max(initial=0) > LARGEST_SCALE:
        raise SchemeError(f"a scale of {scales.max():.3g} does not fit float16 (largest: {LARGEST_SCALE:.0f})")
    fitting: Float16 = np.maximum(scales, SMALLEST_SCALE).astype(np.float16)
    return fitting


def pack_u4(codes: UInt8) -> UInt8:
    """Two 4-bit codes a byte, the first in the low half; the last axis (of even length) shrinks to half."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_u4(packed: UInt8) -> UInt8:
    """The inverse of `pack_u4`."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return codes
