"""Scales and zero-points by search: the range of each group is shrunk while its weighted squared error falls.

A linear layer turns the error E of a weight row into an output error whose mean square is sum_k E_k^2 mean(x_k^2) as
long as the inputs x_k are uncorrelated; so each weight counts as much as the second moment of its input.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from dskquant.planes import LARGEST_SCALE, SMALLEST_SCALE, Float16, Float32, UInt8, group_length

SHRINKS = (1.0, 0.9, 0.8, 0.7)
"""What the low and the high end of the range of a group are multiplied with, independently."""

REFITS = 2
ELEMENTS_AT_ONCE = 1 << 17
"""Weights searched in one go: what is computed of them stays in the cache of a core."""


def search_ranges(
    weights: Float32, importance: Float32, bits: int, group_size: int, symmetric: bool
) -> tuple[Float16, UInt8]:
    """Scales and zero-points [N, G] of `weights` [N, K] that make rounding cost little.

    `importance` [K] is the weight of each column's squared error, E[x^2] of the input it is multiplied with. After the
    search over shrunk ranges the scale is fitted to the codes by weighted least squares, and the codes to the scale.
    Raises SchemeError when groups do not divide K.
    """
    rows, columns = weights.shape
    length = group_length(columns, group_size)
    grouped, weighting = weights.reshape(rows, -1, length), importance.reshape(-1, length)
    step = max(1, ELEMENTS_AT_ONCE // columns)
    found = [_Search(grouped[start : start + step], weighting, bits).run(symmetric) for start in range(0, rows, step)]
    scales, zero_points = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return scales.astype(np.float16), zero_points.astype(np.uint8)


class _Search:
    """The best range so far of each group of some rows, [rows, groups, length]."""

    def __init__(self, weights: Float32, importance: Float32, bits: int) -> None:
        self._weights = weights
        self._importance = importance
        self._top = np.float32(2**bits - 1)
        shape = weights.shape[:2]
        self._error = np.full(shape, np.inf, np.float32)
        self._scales = np.ones(shape, np.float32)
        self._zero_points = np.zeros(shape, np.float32)
        self._buffer = np.empty_like(weights)

    def run(self, symmetric: bool) -> tuple[Float32, Float32]:
        for scales, zero_points in self._symmetric_ranges() if symmetric else self._ranges():
            self._offer(scales, zero_points)
        for _ in range(REFITS):
            self._offer(self._refitted(), self._zero_points)
        return self._scales, self._zero_points

    def _ranges(self) -> Iterator[tuple[Float32, Float32]]:
        low = np.minimum(self._weights.min(axis=2), 0)
        high = np.maximum(self._weights.max(axis=2), 0)
        for shrink_low, shrink_high in itertools.product(SHRINKS, SHRINKS):
            scales = as_scales((high * np.float32(shrink_high) - low * np.float32(shrink_low)) / self._top)
            yield scales, np.clip(np.rint(-low * np.float32(shrink_low) / scales), 0, self._top)

    def _symmetric_ranges(self) -> Iterator[tuple[Float32, Float32]]:
        middle = (self._top + 1) / 2
        reach = np.abs(self._weights).max(axis=2)
        for shrink in SHRINKS:
            yield as_scales(reach * np.float32(shrink) / (middle - 1)), np.full_like(reach, middle)

    def _offer(self, scales: Float32, zero_points: Float32) -> None:
        """Takes scales and zero-points where they are better."""
        residue = self._centred_codes(scales, zero_points)
        residue *= scales[:, :, None]
        residue -= self._weights
        error = np.einsum("rgk,rgk,gk->rg", residue, residue, self._importance)
        better = error < self._error
        for best, offered in ((self._error, error), (self._scales, scales), (self._zero_points, zero_points)):
            np.copyto(best, offered, where=better)

    def _refitted(self) -> Float32:
        """The scales that suit the codes of the best range best, by weighted least squares."""
        codes = self._centred_codes(self._scales, self._zero_points)
        wanted = np.einsum("rgk,rgk,gk->rg", codes, self._weights, self._importance)
        size = np.einsum("rgk,rgk,gk->rg", codes, codes, self._importance)
        return as_scales(np.divide(wanted, size, out=self._scales.copy(), where=size > 0))

    def _centred_codes(self, scales: Float32, zero_points: Float32) -> Float32:
        """The codes less their zero-point; in memory that the next call takes again."""
        codes = np.divide(self._weights, scales[:, :, None], out=self._buffer)
        np.rint(codes, out=codes)
        np.maximum(codes, -zero_points[:, :, None], out=codes)
        np.minimum(codes, self._top - zero_points[:, :, None], out=codes)
        return codes


def as_scales(scales: Float32) -> Float32:
    """The values nearest to `scales` that a set can hold: float16, positive, not denormal."""
    held: Float32 = np.clip(scales, SMALLEST_SCALE, LARGEST_SCALE).astype(np.float16).astype(np.float32)
    return held
