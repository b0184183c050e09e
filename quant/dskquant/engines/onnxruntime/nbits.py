"""A quantized matrix of a parameter set in the layout of `com.microsoft.MatMulNBits`.

The operator (onnxruntime, docs/ContribOperators.md) wants B uint8 [N, blocks, block_size * bits / 8], 4-bit codes low
half first: byte for byte how parameter sets pack them, so codes stay in the mapped file. Scales become float32
[N, blocks]; zero-points are packed like codes, each row on whole bytes. Whatever group size a set has, dequantized
weights are the same to the last bit: a group that is longer than a block gives its scale to several blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import EngineError
from dskquant.parameter_set import MappedMatrix
from dskquant.planes import pack_u4

BLOCK_SIZES = (128, 64, 32, 16)
"""What a row of one group is cut into: the largest that divides it. Longer blocks are faster."""


@dataclass(frozen=True, slots=True)
class NBitsMatrix:
    """Inputs of a MatMulNBits that multiplies with a matrix [N, K]."""

    codes: NDArray[np.uint8]  # [N, blocks, block_size * bits / 8], mapped
    scales: NDArray[np.float32]  # [N, blocks]
    zero_points: NDArray[np.uint8] | None  # [N, ceil(blocks * bits / 8)]; None: the middle of the code range for all
    bits: int
    block_size: int

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def columns(self) -> int:
        return int(self.codes.shape[1]) * self.block_size


def repack(name: str, matrix: MappedMatrix, bits: int) -> NBitsMatrix:
    """`matrix` (4 or 8 bits) for MatMulNBits. Raises EngineError, naming the tensor, where no block size fits it."""
    rows, groups = matrix.scales.shape
    columns = matrix.codes.shape[1] * 8 // bits
    block_size = _block_size(name, columns, columns // groups)
    repeats = columns // groups // block_size
    zero_points = matrix.zero_points.repeat(repeats, axis=1)
    is_centred = bool((zero_points == 1 << (bits - 1)).all())
    return NBitsMatrix(
        codes=matrix.codes.reshape(rows, columns // block_size, block_size * bits // 8),
        scales=matrix.scales.astype(np.float32).repeat(repeats, axis=1),
        zero_points=None if is_centred else _packed_rows(zero_points, bits),
        bits=bits,
        block_size=block_size,
    )


def joined(matrices: Sequence[NBitsMatrix]) -> NBitsMatrix:
    """The rows of all of `matrices`, which have the same bits and blocks."""
    first, *others = matrices
    if not others:
        return first
    are_centred = all(matrix.zero_points is None for matrix in matrices)
    return NBitsMatrix(
        codes=np.concatenate([matrix.codes for matrix in matrices]),
        scales=np.concatenate([matrix.scales for matrix in matrices]),
        zero_points=None if are_centred else np.concatenate([_zero_points(matrix) for matrix in matrices]),
        bits=first.bits,
        block_size=first.block_size,
    )


def _zero_points(matrix: NBitsMatrix) -> NDArray[np.uint8]:
    if matrix.zero_points is not None:
        return matrix.zero_points
    rows, blocks = matrix.scales.shape
    return _packed_rows(np.full((rows, blocks), 1 << (matrix.bits - 1), np.uint8), matrix.bits)


def _block_size(name: str, columns: int, group: int) -> int:
    fitting = [size for size in BLOCK_SIZES if group % size == 0]
    if not fitting:
        raise EngineError(
            f"{name}: ONNX Runtime multiplies blocks of {BLOCK_SIZES[-1]} weights or more; "
            f"none divides groups of {group} in rows of {columns}"
        )
    return fitting[0]


def _packed_rows(zero_points: NDArray[np.uint8], bits: int) -> NDArray[Any]:
    if bits == 8:
        return zero_points
    missing = zero_points.shape[1] % 2
    return pack_u4(np.pad(zero_points, ((0, 0), (0, missing))))
