"""Polishes a quantized matrix: codes and scales in turn are made the best ones while the others stand.

The error to be lowered is E H E^T, E = W - dequantized, of each row. Codes: coordinate descent, column by column
(Behdin et al. 2023, "QuantEase: Optimization-based Quantization for Language Models", algorithm 1). Scales: least
squares over all groups of a row at once.
"""

from __future__ import annotations

import numpy as np

from dskquant.calibration.range_search import as_scales
from dskquant.planes import Float32, QuantizedMatrix

ROUNDS = 2
BLOCK = 32
"""Columns whose changes are handed on one by one."""

TOP = np.float32(15)
RIDGE = 1e-9
"""Keeps the equations of groups whose codes are all at their zero-point regular."""


def polished(matrix: QuantizedMatrix, weights: Float32, moments: Float32) -> QuantizedMatrix:
    """`matrix`, 4-bit codes of `weights` [N, K], with less error under the regular second moments [K, K]."""
    for _ in range(ROUNDS):
        matrix = with_best_scales(with_better_codes(matrix, weights, moments), weights, moments)
    return matrix


def with_better_codes(matrix: QuantizedMatrix, weights: Float32, moments: Float32) -> QuantizedMatrix:
    """One sweep over the columns: each code becomes the best one while all others stand."""
    columns = weights.shape[1]
    length = columns // matrix.scales.shape[1]
    codes = np.ascontiguousarray(matrix.codes.T).astype(np.float32)  # [K, N]: a column lies in one piece
    errors = np.ascontiguousarray((weights - matrix.dequantized()).T)
    scales = matrix.scales.T.astype(np.float32)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        slopes = moments[start:stop] @ errors
        for index in range(start, stop):
            scale = scales[index // length]
            best = codes[index] + slopes[index - start] / (moments[index, index] * scale)
            best = np.clip(np.rint(best), 0, TOP)
            change = (codes[index] - best) * scale
            codes[index] = best
            errors[index] += change
            slopes[index - start + 1 :] += moments[index + 1 : stop, index, None] * change
    return QuantizedMatrix(np.ascontiguousarray(codes.T).astype(np.uint8), matrix.scales, matrix.zero_points)


def with_best_scales(matrix: QuantizedMatrix, weights: Float32, moments: Float32) -> QuantizedMatrix:
    """The scales that suit the codes best, as float16 holds them; a group that has no good one keeps its own."""
    rows, groups = matrix.scales.shape
    codes = matrix.codes.reshape(rows, groups, -1).astype(np.float32) - matrix.zero_points[:, :, None]
    length = codes.shape[2]
    wanted = np.einsum("rgk,rgk->rg", codes, (weights @ moments).reshape(codes.shape))
    coupling = np.empty((rows, groups, groups))
    for group in range(groups):
        weighted = codes[:, group] @ moments[group * length : (group + 1) * length]
        coupling[:, group] = np.einsum("rgk,rgk->rg", weighted.reshape(codes.shape), codes)
    ridge = np.maximum(RIDGE * np.trace(coupling, axis1=1, axis2=2), np.finfo(np.float32).tiny)
    coupling += ridge[:, None, None] * np.eye(groups)
    best = np.linalg.solve(coupling, wanted[:, :, None])[:, :, 0]
    old = matrix.scales.astype(np.float64)
    best = np.where((old / 2 < best) & (best < old * 2), best, old)
    scales = as_scales(best.astype(np.float32)).astype(np.float16)
    return QuantizedMatrix(matrix.codes, scales, matrix.zero_points)
