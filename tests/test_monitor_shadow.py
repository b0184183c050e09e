"""Scores of shadowed positions equal independent formulas; the choice of positions is fair, spread out and bounded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dskd.monitor.shadow import BUDGET_DEPTH_S, TimeBudget, is_sampled, phase_of, score


def logits_of(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows)).astype(np.float32)


def test_hand_computed_scores() -> None:
    reference = logits_of([0.5, 0.25, 0.25], [0.1, 0.6, 0.3])
    served = logits_of([0.25, 0.5, 0.25], [0.1, 0.6, 0.3])
    scores = score(reference, served, np.array([1, 0]))
    # KL = 1/2 ln 2 + 1/4 ln 1/2 = 1/4 ln 2
    assert scores.kl == pytest.approx([math.log(2) / 4, 0.0], abs=1e-6)
    assert scores.agrees.tolist() == [False, True]
    assert scores.rank.tolist() == [1, 2]
    assert scores.finite.tolist() == [True, True]


def test_scores_equal_a_sum_over_plain_floats() -> None:
    random = np.random.default_rng(3)
    reference = (random.standard_normal((5, 300)) * 4).astype(np.float32)
    served = (reference + random.standard_normal(reference.shape)).astype(np.float32)
    tokens = random.integers(0, 300, 5)
    scores = score(reference, served, tokens)
    for row in range(5):
        p, q = ([math.exp(float(x)) for x in side[row]] for side in (reference, served))
        total_p, total_q = math.fsum(p), math.fsum(q)
        kl = math.fsum(a / total_p * math.log(a / total_p / (b / total_q)) for a, b in zip(p, q, strict=True))
        assert scores.kl[row] == pytest.approx(kl, rel=1e-9)
        order = sorted(range(300), key=lambda token: -reference[row, token])
        assert scores.rank[row] == order.index(tokens[row])
        assert scores.agrees[row] == (order[0] == max(range(300), key=lambda token: served[row, token]))


def test_noise_far_below_float32_resolution_of_the_probabilities_is_still_measured() -> None:
    reference = np.linspace(0, 10, 50_000, dtype=np.float32)[np.newaxis]
    served = reference.copy()
    served[0, -1] += 0.01
    p = math.exp(10) / sum(math.exp(float(x)) for x in reference[0])
    shift = float(served[0, -1] - reference[0, -1])
    kl = math.log1p(p * math.expm1(shift)) - p * shift  # of one logit shifted by `shift`: about p shift^2 / 2, 1e-8
    assert score(reference, served, np.array([0])).kl[0] == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_infinitely_far_and_leaves_the_others_alone(side: int, value: float) -> None:
    pair = [np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)]
    pair[side][0, 2] = value
    scores = score(pair[0], pair[1], np.array([0, 0]))
    assert scores.kl.tolist() == [math.inf, 0.0]
    assert scores.agrees.tolist() == [False, True]
    assert scores.finite.tolist() == [False, True]


def test_no_positions_have_no_scores() -> None:
    assert len(score(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32), np.zeros(0, np.int64)).kl) == 0


@settings(max_examples=50)
@given(st.text(max_size=8), st.floats(0.001, 1.0))
def test_every_stretch_of_a_sequence_has_its_share_of_samples_and_no_burst(key: str, share: float) -> None:
    phase = phase_of(key)
    sampled = [position for position in range(200) if is_sampled(phase, position, share)]
    assert abs(len(sampled) - 200 * share) <= 1
    assert all(after - before >= math.floor(1 / share) for before, after in itertools.pairwise(sampled))


def test_all_or_nothing_can_be_sampled() -> None:
    assert all(is_sampled(phase_of("a"), position, 1.0) for position in range(1000))
    assert not any(is_sampled(phase_of("a"), position, 0.0) for position in range(1000))


def test_each_position_is_as_likely_as_any_other_and_a_request_always_has_the_same() -> None:
    phases = [phase_of(f"request-{i}") for i in range(4000)]
    for position in (0, 1, 7, 49):
        hits = sum(is_sampled(phase, position, 0.1) for phase in phases)
        assert abs(hits - 400) < 5 * math.sqrt(4000 * 0.1 * 0.9)
    assert phase_of("request-1") == phases[1]


@pytest.mark.parametrize("cost", [0.005, 0.28, 3.0])
def test_scoring_never_takes_more_than_its_share_of_the_time(cost: float) -> None:
    """But for the first time, when nobody knows how long it will take."""
    budget = TimeBudget(0.03)
    spent = loop = 0.0
    for _ in range(20_000):
        now = cost if budget.allows else 0.0
        if now:
            budget.spend(now)
        budget.earn(0.070 + now)
        spent, loop = spent + now, loop + 0.070 + now
        assert spent <= 0.03 * loop or spent == cost
    assert spent / loop > 0.028


def test_a_quiet_hour_is_not_followed_by_a_burst() -> None:
    budget = TimeBudget(0.03)
    budget.earn(3600.0)
    burst = 0
    while budget.allows:
        budget.spend(0.125)
        burst += 1
    assert burst == BUDGET_DEPTH_S / 0.125


def test_without_time_nothing_is_scored() -> None:
    budget = TimeBudget(0.0)
    budget.earn(100.0)
    assert not budget.allows
