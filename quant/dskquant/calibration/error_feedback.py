"""Error feedback: what rounding a column costs is made good by the columns not yet rounded.

Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", algorithm 1:
the mean squared output error of a row is E H E^T with E = W - dequantized and H = E[x x^T]. With U the upper Cholesky
factor of the inverse of H, column k is rounded and its error, divided by U_kk, is taken off the columns behind it in
the proportions of the row U_k. What remains of an error e in column k then costs (e / U_kk)^2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dskquant.calibration.polishing import polished
from dskquant.calibration.range_search import search_ranges
from dskquant.planes import Float32, QuantizedMatrix, group_length

DAMPING = 0.2
"""Added to the diagonal of H, as a share of its median. The paper takes 0.01 of the mean, which a single loud input
can make too much for all others; this much is measurably better on other text than less."""

FLOOR = 1e-3
"""And this share of its mean: where most inputs are silent."""

SMALLEST = np.float32(1e-12)
"""And this much where all are."""

BLOCK = 32
"""Columns whose errors are handed on one by one; those of a whole block reach the columns behind it in one product."""

BITS = 4
TOP = np.float32(2**BITS - 1)


def quantize_with_feedback(
    weights: Float32, second_moments: Float32, group_size: int, symmetric: bool
) -> QuantizedMatrix:
    """Quantizes `weights` [N, K] to 4 bits with the second moments H = E[x x^T] [K, K] of the inputs.

    Groups come in the order of the energy of their inputs, so that the loud ones have the most columns behind them to
    make up for their errors. Raises SchemeError when groups do not divide K.
    """
    length = group_length(weights.shape[1], group_size)
    moments = damped(second_moments)
    order = _loudest_first(np.diag(moments), length)
    columns = (order[:, None] * length + np.arange(length)).ravel()
    fed_back = feed_back(weights[:, columns], moments[np.ix_(columns, columns)], length, symmetric)
    return polished(_in_place(fed_back, order, columns), weights, moments)


def damped(moments: Float32) -> Float32:
    """`moments` [K, K] with the diagonal raised, which makes them regular and trusts the sample less."""
    raised = moments.copy()
    energies = np.diag(moments)
    raised[np.diag_indices_from(raised)] += DAMPING * np.median(energies) + FLOOR * energies.mean() + SMALLEST
    return raised


def feed_back(weights: Float32, moments: Float32, length: int, symmetric: bool) -> QuantizedMatrix:
    """The algorithm over groups of `length` columns from left to right; `moments` must be regular.

    The range of a group is searched when its turn comes, from weights that make up for the errors before it.
    """
    return _Feedback(weights, inverse_factor(moments), length, symmetric).run()


def inverse_factor(moments: Float32) -> Float32:
    """The upper triangular U with U^T U = inverse of `moments` [K, K]."""
    exact: NDArray[np.float64] = moments.astype(np.float64)
    # H = R R^T with R upper triangular comes from the Cholesky factor of H read backwards; U is the inverse of R
    backwards = np.linalg.cholesky(exact[::-1, ::-1])[::-1, ::-1]
    factor: Float32 = np.linalg.inv(backwards).astype(np.float32)
    return factor


class _Feedback:
    def __init__(self, weights: Float32, factor: Float32, length: int, symmetric: bool) -> None:
        rows, columns = weights.shape
        self._length = length
        self._symmetric = symmetric
        self._factor = factor
        self._importance = np.diag(factor) ** -2
        self._columns = np.ascontiguousarray(weights.T)  # [K, N]: a column lies in one piece
        self._codes = np.empty((columns, rows), np.uint8)
        self._scales = np.empty((columns // length, rows), np.float16)
        self._zero_points = np.empty((columns // length, rows), np.uint8)

    def run(self) -> QuantizedMatrix:
        for group in range(len(self._scales)):
            first, last = group * self._length, (group + 1) * self._length
            self._find_range(group, slice(first, last))
            for start in range(first, last, BLOCK):
                self._round_block(start, min(start + BLOCK, last), group)
        parts = (self._codes, self._scales, self._zero_points)
        return QuantizedMatrix(*(np.ascontiguousarray(part.T) for part in parts))

    def _find_range(self, group: int, span: slice) -> None:
        weights = np.ascontiguousarray(self._columns[span].T)
        scales, zero_points = search_ranges(weights, self._importance[span], BITS, self._length, self._symmetric)
        self._scales[group], self._zero_points[group] = scales[:, 0], zero_points[:, 0]

    def _round_block(self, start: int, stop: int, group: int) -> None:
        scales = self._scales[group].astype(np.float32)
        zero_points = self._zero_points[group].astype(np.float32)
        errors = np.empty((stop - start, len(scales)), np.float32)
        for index in range(start, stop):
            column = self._columns[index]
            codes = np.clip(np.rint(column / scales) + zero_points, 0, TOP)
            self._codes[index] = codes
            error = (column - (codes - zero_points) * scales) / self._factor[index, index]
            self._columns[index + 1 : stop] -= self._factor[index, index + 1 : stop, None] * error
            errors[index - start] = error
        self._columns[stop:] -= self._factor[start:stop, stop:].T @ errors


def _loudest_first(energies: Float32, length: int) -> NDArray[np.intp]:
    """The groups of `length` inputs, those with the highest sum of `energies` first."""
    return np.argsort(-energies.reshape(-1, length).sum(axis=1), kind="stable")


def _in_place(matrix: QuantizedMatrix, order: NDArray[np.intp], columns: NDArray[np.intp]) -> QuantizedMatrix:
    """`matrix` with its groups, which stand in `order`, back where they belong."""
    groups_back, columns_back = np.argsort(order), np.argsort(columns)
    return QuantizedMatrix(
        np.ascontiguousarray(matrix.codes[:, columns_back]),
        np.ascontiguousarray(matrix.scales[:, groups_back]),
        np.ascontiguousarray(matrix.zero_points[:, groups_back]),
    )
