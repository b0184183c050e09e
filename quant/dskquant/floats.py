"""The floating-point formats that weights are stored in: "f16", "bf16" (as uint16 bit patterns) and "f32"."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY_FLOATS: dict[str, np.dtype[Any]] = {
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "f32": np.dtype("<f4"),
}
BF16_EXPONENT = 0x7F80


def to_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Values stored as `dtype` as float32, exactly."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)


def from_float32(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Finite values rounded to nearest, ties to even, as `dtype` stores them; too large ones become infinite."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(NUMPY_FLOATS[dtype])


def all_finite(values: NDArray[Any], dtype: str) -> bool:
    """Whether no value is NaN or infinite."""
    if dtype == "bf16":
        return not bool(((values & BF16_EXPONENT) == BF16_EXPONENT).any())
    return bool(np.isfinite(values).all())
