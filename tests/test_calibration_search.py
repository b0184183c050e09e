"""Search for ranges, error feedback and polishing, against plain float64 forms of the same mathematics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dskquant.calibration.error_feedback import damped, feed_back, inverse_factor, quantize_with_feedback
from dskquant.calibration.polishing import with_best_scales, with_better_codes
from dskquant.calibration.range_search import SHRINKS, search_ranges
from dskquant.errors import SchemeError
from dskquant.planes import SMALLEST_SCALE, QuantizedMatrix, quantize, rounded

seeds = st.integers(0, 2**32 - 1)


def weights_and_inputs(seed: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights with a few outliers, and the second moments of correlated inputs of very different strength."""
    generator = np.random.default_rng(seed)
    weights = generator.standard_t(4, (rows, columns)).astype(np.float32) * np.float32(0.02)
    mixing = generator.normal(size=(columns, columns)) * np.exp(generator.normal(size=columns))[:, None]
    inputs = generator.normal(size=(4 * columns, columns)) @ mixing.T
    return weights, (inputs.T @ inputs / len(inputs)).astype(np.float32)


def group_error(weights: np.ndarray, importance: np.ndarray, scale: float, zero_point: float) -> float:
    """Weighted squared error of one group, from the definition of a code (Jacob et al. 2018, equation 1)."""
    codes = np.clip(np.rint(weights / scale) + zero_point, 0, 15)
    return float((importance * (weights - (codes - zero_point) * scale) ** 2).sum())


def output_error(weights: np.ndarray, matrix: QuantizedMatrix, moments: np.ndarray) -> float:
    """tr(E H E^T) in float64."""
    error = weights.astype(np.float64) - matrix.dequantized()
    return float(np.einsum("nk,kl,nl->", error, moments.astype(np.float64), error))


def best_of_the_shrunk_ranges(weights: np.ndarray, importance: np.ndarray) -> float:
    low, high = min(weights.min(), 0.0), max(weights.max(), 0.0)
    errors = []
    for shrink_low in SHRINKS:
        for shrink_high in SHRINKS:
            scale = float(np.float16((high * shrink_high - low * shrink_low) / 15))
            zero_point = float(np.clip(np.rint(-low * shrink_low / scale), 0, 15))
            errors.append(group_error(weights, importance, scale, zero_point))
    return min(errors)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_the_search_is_as_good_as_trying_every_shrunk_range_in_float64(seed: int) -> None:
    weights, moments = weights_and_inputs(seed, 2, 64)
    importance = np.diag(moments).copy()
    scales, zero_points = search_ranges(weights, importance, 4, 32, symmetric=False)
    for row in range(2):
        for group, span in enumerate((slice(0, 32), slice(32, 64))):
            chosen = weights[row, span].astype(np.float64), importance[span].astype(np.float64)
            found = group_error(*chosen, float(scales[row, group]), float(zero_points[row, group]))
            assert found <= best_of_the_shrunk_ranges(*chosen) * 1.001


def test_the_search_comes_near_the_best_of_all_scales_and_zero_points() -> None:
    weights, moments = weights_and_inputs(3, 24, 32)
    importance = np.diag(moments).copy()
    scales, zero_points = search_ranges(weights, importance, 4, 32, symmetric=False)
    found, best = 0.0, 0.0
    for row, values in enumerate(weights.astype(np.float64)):
        widest = np.ptp(values) / 15
        found += group_error(values, importance, float(scales[row, 0]), float(zero_points[row, 0]))
        best += min(
            group_error(values, importance, float(np.float16(widest * share)), zero_point)
            for share in np.linspace(0.4, 1.05, 120)
            for zero_point in range(16)
        )
    assert best <= found <= best * 1.15


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_scales_of_the_search_can_be_held_by_a_set(symmetric: bool) -> None:
    weights = np.random.default_rng(1).normal(0, 1e-9, (4, 64)).astype(np.float32)
    weights[2] = 0
    scales, zero_points = search_ranges(weights, np.ones(64, np.float32), 4, 32, symmetric)
    assert (scales.dtype, zero_points.dtype) == (np.float16, np.uint8)
    assert (scales >= SMALLEST_SCALE).all()
    assert (zero_points <= 15).all()
    assert not symmetric or (zero_points == 8).all()


def test_weighting_the_error_lowers_the_output_error_of_rounding() -> None:
    weights, moments = weights_and_inputs(5, 64, 128)
    scales, zero_points = search_ranges(weights, np.diag(moments).copy(), 4, 64, symmetric=False)
    diagonal = np.diag(np.diag(moments))
    searched = output_error(weights, rounded(weights, scales, zero_points, 4), diagonal)
    assert searched < 0.85 * output_error(weights, quantize(weights, 4, 64, symmetric=False), diagonal)


def plain_feedback(weights: np.ndarray, moments: np.ndarray, length: int) -> np.ndarray:
    """Dequantized weights by the algorithm column by column, in float64: after each column it is eliminated from the
    inverse of the moments (Frantar et al. 2023, equations 2 and 3).
    """
    left = weights.astype(np.float64)
    inverse = np.linalg.inv(moments.astype(np.float64))
    spreads = np.diag(np.linalg.cholesky(inverse).T) ** 2
    values = np.empty_like(left)
    for column in range(left.shape[1]):
        if column % length == 0:
            span = slice(column, column + length)
            importance = (1 / spreads[span]).astype(np.float32)
            grid = search_ranges(left[:, span].astype(np.float32), importance, 4, length, symmetric=False)
            scales, zero_points = (part[:, 0].astype(np.float64) for part in grid)
        codes = np.clip(np.rint(left[:, column] / scales) + zero_points, 0, 15)
        values[:, column] = (codes - zero_points) * scales
        error = (left[:, column] - values[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column, column] = 1.0  # eliminated: only keeps later divisions away from zero
    return values


def test_blocked_feedback_gives_what_the_plain_algorithm_gives() -> None:
    weights, moments = weights_and_inputs(11, 16, 192)
    moments = damped(moments)
    expected = plain_feedback(weights, moments, 64)
    actual = feed_back(weights, moments, 64, symmetric=False).dequantized()
    # a code on the edge between two may fall to either side in float32, and the columns behind it follow
    assert (np.abs(actual - expected) < 1e-5).mean() > 0.97


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 0])
def test_feedback_lowers_the_output_error_by_far_against_rounding(group_size: int, symmetric: bool) -> None:
    weights, moments = weights_and_inputs(13, 48, 160)
    matrix = quantize_with_feedback(weights, moments, group_size, symmetric)
    plain = quantize(weights, 4, group_size, symmetric)
    assert matrix.scales.shape == plain.scales.shape
    assert output_error(weights, matrix, moments) < 0.5 * output_error(weights, plain, moments)
    assert matrix.codes.max() <= 15
    assert (matrix.scales >= SMALLEST_SCALE).all()


def test_inputs_that_were_always_zero_do_no_harm() -> None:
    weights, moments = weights_and_inputs(17, 8, 64)
    moments[:, 5] = moments[5, :] = 0
    for its_moments in (moments, np.zeros_like(moments)):
        matrix = quantize_with_feedback(weights, its_moments, 32, symmetric=False)
        assert np.isfinite(matrix.dequantized()).all()
        assert np.abs(matrix.dequantized() - weights).max() < 8 * float(matrix.scales.max())


def test_the_factor_is_that_of_the_inverse() -> None:
    _, moments = weights_and_inputs(19, 1, 96)
    moments = damped(moments)
    factor = inverse_factor(moments).astype(np.float64)
    assert np.array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ moments, np.eye(96), atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_polishing_never_raises_the_error_it_works_on(seed: int) -> None:
    weights, moments = weights_and_inputs(seed, 6, 64)
    moments = damped(moments)
    start = quantize(weights, 4, 32, symmetric=False)
    codes = with_better_codes(start, weights, moments)
    scales = with_best_scales(codes, weights, moments)
    assert output_error(weights, codes, moments) <= output_error(weights, start, moments) * 1.0001
    # the best scales are rounded to float16
    assert output_error(weights, scales, moments) <= output_error(weights, codes, moments) * 1.002


def test_for_uncorrelated_inputs_the_better_codes_are_the_nearest() -> None:
    weights, moments = weights_and_inputs(23, 6, 64)
    nearest = quantize(weights, 4, 32, symmetric=False)
    wrong = QuantizedMatrix(15 - nearest.codes, nearest.scales, nearest.zero_points)
    better = with_better_codes(wrong, weights, np.diag(np.diag(moments)))
    assert (better.codes == nearest.codes).mean() > 0.99


def test_the_best_scale_of_one_group_is_that_of_weighted_least_squares() -> None:
    weights, moments = weights_and_inputs(29, 6, 64)
    matrix = quantize(weights, 4, 0, symmetric=False)
    centred = matrix.codes.astype(np.float64) - matrix.zero_points
    wanted = np.einsum("nk,kl,nl->n", centred, moments, weights) / np.einsum("nk,kl,nl->n", centred, moments, centred)
    best = with_best_scales(matrix, weights, moments)
    np.testing.assert_allclose(best.scales[:, 0], wanted, rtol=2**-10)


def test_groups_that_do_not_divide_the_row_are_refused() -> None:
    weights, moments = weights_and_inputs(31, 2, 96)
    with pytest.raises(SchemeError, match="group size 64 does not divide rows of 96"):
        quantize_with_feedback(weights, moments, 64, symmetric=False)
