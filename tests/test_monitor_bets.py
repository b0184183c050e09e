"""The sequential test: no false alarm in long healthy traces of heavy-tailed noise, and alarms as soon as predicted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dskd.monitor.bets import CAP, FALL_BETS, RISE_BETS, TYPICAL_SIGMA, MeanDetector, samples_to_trip

Noise = Callable[[np.random.Generator, float, int], "np.ndarray"]

HEAVY_SIGMA = 1.43  # of noise much heavier-tailed than that of the models measured
THRESHOLD = 0.6  # factor 2 of a healthy mean KL of 0.3 nats
NEEDED = math.log(100_000.0)


def lognormal(random: np.random.Generator, mean: float, count: int, sigma: float = HEAVY_SIGMA) -> np.ndarray:
    """A mean of 0.3 has a 99th percentile of 3."""
    return random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)


def gamma(random: np.random.Generator, mean: float, count: int) -> np.ndarray:
    return random.gamma(0.25, mean / 0.25, count)


def highest_evidence(samples: np.ndarray, threshold: float, bets: tuple[float, ...]) -> float:
    detector = MeanDetector(threshold, bets)
    highest = -math.inf
    for sample in samples.tolist():
        detector.push(sample)
        highest = max(highest, detector.evidence)
    return highest


def delay(detector: MeanDetector, samples: np.ndarray, needed: float) -> float:
    """Samples until the evidence suffices."""
    for count, sample in enumerate(samples.tolist(), 1):
        detector.push(sample)
        if detector.evidence >= needed:
            return count
    return math.inf


def test_the_noise_that_the_figures_are_made_with_has_a_99th_percentile_of_ten_means() -> None:
    samples = lognormal(np.random.default_rng(0), 0.3, 1_000_000)
    assert samples.mean() == pytest.approx(0.3, rel=0.02)
    assert np.quantile(samples, 0.99) == pytest.approx(3.0, rel=0.03)


@pytest.mark.parametrize("noise", [lognormal, gamma])
def test_healthy_noise_raises_no_alarm_in_200_answers_of_20_000_tokens(noise: Noise) -> None:
    """At one token in 25 scored; the highest evidence of all is far from the 11.5 that an alarm takes."""
    samples = noise(np.random.default_rng(1), 0.3, 200 * 800)
    assert highest_evidence(samples, THRESHOLD, RISE_BETS) < NEEDED - math.log(100)


@pytest.mark.parametrize("noise", [lognormal, gamma])
def test_noise_right_on_the_threshold_alarms_no_more_often_than_promised(noise: Noise) -> None:
    """With A samples between alarms on average at least, 100 stretches of A / 20 samples have 5 at most on average."""
    alarms = 0
    for seed in range(100):
        samples = noise(np.random.default_rng(seed), THRESHOLD, 50)
        alarms += delay(MeanDetector(THRESHOLD, RISE_BETS), samples, math.log(1000)) < math.inf
    assert alarms <= 12  # 5 + 3 sqrt(5)


def test_correlated_noise_of_streams_that_move_together_raises_no_alarm_either() -> None:
    random = np.random.default_rng(2)
    level = np.repeat(random.uniform(0.5, 1.5, 500), 40)  # texts of 40 samples, harder and easier ones
    assert highest_evidence(level * lognormal(random, 0.3, 20_000), THRESHOLD, RISE_BETS) < NEEDED


@pytest.mark.parametrize("sigma", [TYPICAL_SIGMA, HEAVY_SIGMA])
@pytest.mark.parametrize("mean", [0.9, 1.2, 1.8, 3.0])
def test_a_rise_after_a_long_healthy_time_is_noticed_as_soon_as_predicted(mean: float, sigma: float) -> None:
    delays = []
    for seed in range(25):
        random = np.random.default_rng(seed)
        detector = MeanDetector(THRESHOLD, RISE_BETS)
        assert delay(detector, lognormal(random, 0.3, 300, sigma), NEEDED) == math.inf
        delays.append(delay(detector, lognormal(random, mean, 5000, sigma), NEEDED))
    assert np.mean(delays) == pytest.approx(samples_to_trip(mean, THRESHOLD, 100_000.0, sigma), rel=0.3)


def test_predictions_shrink_with_the_noise_and_have_no_end_on_the_threshold() -> None:
    predicted = [samples_to_trip(mean, THRESHOLD, 100_000.0) for mean in (0.3, 0.6, 0.75, 0.9, 1.8, 6.0)]
    assert predicted[:2] == [math.inf, math.inf]
    assert all(later < sooner for sooner, later in itertools.pairwise(predicted[1:]))
    # with no spread the growth of the largest bet is known in closed form: ln(1 + 0.5 (3 - 1)) = ln 2
    assert samples_to_trip(1.8, THRESHOLD, 100.0, sigma=1e-9) == pytest.approx(math.log(500) / math.log(2))


def test_even_infinite_noise_needs_several_samples() -> None:
    fewest = delay(MeanDetector(THRESHOLD, RISE_BETS), np.full(100, math.inf), NEEDED)
    assert fewest == math.ceil(math.log(100_000 * len(RISE_BETS)) / math.log(1 + RISE_BETS[0] * (CAP - 1)))
    assert fewest == 8


@pytest.mark.parametrize(("mean", "at_most"), [(0.001, 75), (0.3, 1000)])
def test_noise_that_is_gone_is_recognised_also_after_a_long_loud_time(mean: float, at_most: int) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        detector = MeanDetector(0.8 * THRESHOLD, FALL_BETS)
        for sample in lognormal(random, 3.0, 500).tolist():
            detector.push(sample)
        assert delay(detector, lognormal(random, mean, 5000), math.log(100)) <= at_most


@pytest.mark.parametrize("mean", [1.2, 3.0])
def test_noise_that_goes_on_is_not_taken_for_gone(mean: float) -> None:
    samples = lognormal(np.random.default_rng(4), mean, 20_000)
    assert highest_evidence(samples, 0.8 * THRESHOLD, FALL_BETS) < math.log(100)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0.001, 1000))
def test_only_the_ratio_of_noise_to_threshold_counts(samples: list[float], scale: float) -> None:
    plain, scaled = MeanDetector(1.0, RISE_BETS), MeanDetector(scale, RISE_BETS)
    for sample in samples:
        plain.push(sample)
        scaled.push(sample * scale)
    assert scaled.evidence == pytest.approx(plain.evidence, abs=1e-6)


def test_evidence_is_the_mean_wealth_of_the_bets() -> None:
    detector = MeanDetector(2.0, (0.5, 0.25))
    detector.push(6.0)  # x / c - 1 = 2: wealth 2 and 1.5
    assert detector.evidence == pytest.approx(math.log((2.0 + 1.5) / 2))
    detector.push(0.0)  # x / c - 1 = -1: wealth 1 and 1.125
    detector.push(0.0)  # 0.5 and 0.84375
    detector.push(6.0)  # both start again from 1
    assert detector.evidence == pytest.approx(math.log((2.0 + 1.5) / 2))
