"""How many bits a weight takes, with everything counted: codes, scales, zero-points, and what is not quantized."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dskquant.parameter_set import Codes
from dskquant.planes import group_length
from dskquant.scheme import Role, TensorScheme
from dskquant.store import StoreManifest

SCALE_BITS = 16 + 8  # of a group: its scale and its zero-point, as the files keep them
FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32}


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of some weights: computing in INT4, computing in INT8 (base + residual), and as their files keep them."""

    int4: float
    int8: float
    stored: float

    def __add__(self, other: Bits) -> Bits:
        return Bits(self.int4 + other.int4, self.int8 + other.int8, self.stored + other.stored)

    def __mul__(self, weights: int) -> Bits:
        return Bits(self.int4 * weights, self.int8 * weights, self.stored * weights)

    def __truediv__(self, weights: int) -> Bits:
        return Bits(self.int4 / weights, self.int8 / weights, self.stored / weights)


NO_BITS = Bits(0, 0, 0)


def tensor_bits(scheme: TensorScheme, codes: Codes = Codes.STORED) -> Bits:
    """Bits of a quantized tensor, scales and zero-points included. Files whose codes are derived hold those alone.

    Raises SchemeError when groups do not divide the rows.
    """
    rows, columns = scheme.shape
    beside_codes = rows * columns // group_length(columns, scheme.group_size) * SCALE_BITS
    plane, eight_bit = (rows * columns * width + beside_codes for width in (4, 8))
    stored_plane, stored_eight_bit = (plane, eight_bit) if codes is Codes.STORED else (beside_codes, beside_codes)
    if scheme.role is not Role.LINEAR:
        return Bits(eight_bit, eight_bit, stored_eight_bit)
    return Bits(
        2 * plane if scheme.always_residual else plane,
        2 * plane,
        2 * stored_plane + (stored_eight_bit if scheme.int8_plane else 0),
    )


def unquantized_bits(store: StoreManifest, quantized: int) -> Bits:
    """Bits of the norms and biases, which stay in the store: all its weights but those `quantized`."""
    bits = (store.parameters - quantized) * FLOAT_BITS[store.dtype]
    return Bits(bits, bits, bits)


def mean_bits(schemes: Collection[TensorScheme], store: StoreManifest, codes: Codes = Codes.STORED) -> Bits:
    """Bits per weight of the whole model, the weights that are not quantized included."""
    quantized = sum(weights_in(scheme) for scheme in schemes)
    total = sum((tensor_bits(scheme, codes) for scheme in schemes), unquantized_bits(store, quantized))
    return total / store.parameters


def weights_in(scheme: TensorScheme) -> int:
    """Weights of a tensor."""
    rows, columns = scheme.shape
    return rows * columns
