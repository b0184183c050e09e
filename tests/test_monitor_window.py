"""Statistics of samples: plain figures of what is in the window, and an interval that covers the mean as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dskd.monitor.window import BATCHES, NoiseSample, NoiseWindow, interval


def fill(window: NoiseWindow, *kl: float, agrees: bool = True, start: float = 0.0) -> None:
    for offset, value in enumerate(kl):
        window.push(NoiseSample(value, agrees, start + offset))


def test_figures_of_a_hand_made_window() -> None:
    window = NoiseWindow(200)
    fill(window, *[float(value) for value in range(101)])
    fill(window, *[50.0] * 99, agrees=False, start=101)
    statistics = window.statistics(200.0)
    assert (statistics.samples, statistics.non_finite, statistics.mean) == (200, 0, 50.0)
    assert (statistics.p50, statistics.agreement) == (50.0, 101 / 200)
    assert statistics.p99 == pytest.approx(np.quantile([*range(101), *[50] * 99], 0.99))


def test_only_the_last_samples_and_none_that_are_too_old_count() -> None:
    window = NoiseWindow(3, seconds=10.0)
    fill(window, 9.0, 1.0, 2.0, 3.0)
    assert window.statistics(3.0).mean == 2.0
    assert window.statistics(12.5).mean == 3.0
    assert window.statistics(13.5).samples == 0
    assert window.total == 4


def test_an_empty_window_has_no_figures() -> None:
    statistics = NoiseWindow(10).statistics(0.0)
    assert statistics.samples == 0
    assert all(math.isnan(value) for value in (statistics.mean, statistics.low, statistics.p99, statistics.agreement))


def test_samples_that_are_not_finite_are_counted_and_kept_out_of_the_mean() -> None:
    window = NoiseWindow(10)
    fill(window, 1.0, math.inf, 3.0)
    statistics = window.statistics(3.0)
    assert (statistics.samples, statistics.non_finite, statistics.mean, statistics.p50) == (3, 1, 2.0, 2.0)
    only = NoiseWindow(10)
    fill(only, math.inf)
    assert math.isnan(only.statistics(1.0).mean)
    assert only.statistics(1.0).non_finite == 1


def test_a_mean_of_few_samples_has_no_interval() -> None:
    assert all(math.isnan(end) for end in interval(np.ones(2 * BATCHES - 1)))
    assert interval(np.ones(2 * BATCHES)) == (1.0, 1.0)


def test_the_interval_is_that_of_the_batch_means() -> None:
    """Batches of 1, 3, 1, 3...: standard deviation sqrt(20 / 19), standard error 1 / sqrt(19), t = 2.093."""
    samples = np.tile([0.0, 2.0, 2.0, 4.0], BATCHES // 2)
    low, high = interval(samples)
    assert (low, high) == (pytest.approx(2 - 2.093 / math.sqrt(19)), pytest.approx(2 + 2.093 / math.sqrt(19)))


@pytest.mark.parametrize(("count", "correlation"), [(512, 0.0), (2000, 0.0), (2000, 0.5)])
def test_the_interval_covers_the_true_mean_about_as_often_as_it_says(count: int, correlation: float) -> None:
    """Of gamma noise, also when neighbours are alike (exponential smoothing of unit gain); 95 % less the skewness."""
    hits = 0
    for seed in range(300):
        noise = np.random.default_rng(seed).gamma(0.25, 0.3 / 0.25, count)
        if correlation:
            for i in range(1, count):
                noise[i] = correlation * noise[i - 1] + (1 - correlation) * noise[i]
        low, high = interval(noise)
        hits += low <= 0.3 <= high
    assert 0.90 <= hits / 300 <= 0.99
