"""Health of tokens: entropy, margin and finiteness as plain float64 formulas have them, repetition as counted anew."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dskd.monitor.health import LOGITS_PER_STEP, HealthProbe, Repetition


def naive_entropy(row: np.ndarray) -> float:
    x = row.astype(np.longdouble)
    p = np.exp(x - x.max())
    p /= p.sum()
    return float(-sum(value * np.log(value) for value in p if value > 0))


@pytest.mark.parametrize(("scale", "offset"), [(0.0, 0.0), (1.0, 0.0), (3.0, 500.0), (30.0, -500.0), (3000.0, 0.0)])
def test_entropy_is_that_of_the_float64_formula_at_any_scale_and_offset(scale: float, offset: float) -> None:
    rows = (np.random.default_rng(1).standard_normal((4, 5003)) * scale + offset).astype(np.float32)
    probe = HealthProbe(5003)
    for row in rows:
        assert probe.measure(row).entropy == pytest.approx(naive_entropy(row), abs=1e-4)


def test_entropy_of_a_large_vocabulary_keeps_its_precision() -> None:
    row = np.random.default_rng(2).standard_normal(151_936).astype(np.float32)
    # of normal logits: ln V + 1/2 - 1, as E[exp x] = sqrt(e) and E[x exp x] / E[exp x] = 1
    assert HealthProbe(len(row)).measure(row).entropy == pytest.approx(math.log(len(row)) - 0.5, abs=0.02)
    assert HealthProbe(len(row)).measure(row).entropy == pytest.approx(naive_entropy(row), abs=1e-4)


def test_hand_computed_tokens() -> None:
    probe = HealthProbe(4)
    uniform = probe.measure(np.full(4, 7.0, np.float32))
    assert (uniform.entropy, uniform.margin) == (pytest.approx(math.log(4)), 0.0)
    halves = probe.measure(np.array([-200.0, 3.0, 3.0, -200.0], np.float32))
    assert (halves.entropy, halves.margin) == (pytest.approx(math.log(2)), 0.0)
    sure = probe.measure(np.array([0.0, 100.0, -5.0, 60.0], np.float32))
    assert (sure.entropy, sure.margin) == (pytest.approx(0.0, abs=1e-12), 40.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2, 6])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(value: float, place: int) -> None:
    row = np.arange(7, dtype=np.float32)
    row[place] = value
    health = HealthProbe(7).measure(row)
    assert not health.finite
    assert math.isnan(health.entropy)
    assert math.isnan(health.margin)


def test_wide_logits_are_measured_without_slow_denormal_numbers() -> None:
    row = np.linspace(-120, 0, 997, dtype=np.float32)
    with np.errstate(under="raise"):
        health = HealthProbe(997).measure(row)
    assert health.entropy == pytest.approx(naive_entropy(row), abs=1e-4)


def test_measuring_leaves_the_logits_alone_and_a_bad_row_leaves_no_trace() -> None:
    probe = HealthProbe(9)
    good = np.linspace(-1, 1, 9, dtype=np.float32)
    before, kept = probe.measure(good), good.copy()
    probe.measure(np.full(9, np.nan, np.float32))
    assert probe.measure(good) == before
    assert np.array_equal(good, kept)


def test_rows_take_turns_and_a_step_reads_no_more_than_its_share() -> None:
    vocabulary = LOGITS_PER_STEP // 3
    probe = HealthProbe(vocabulary)
    logits = np.zeros((8, vocabulary), np.float32)
    seen = [[row for row, _ in probe.step(logits)] for _ in range(8)]
    assert seen[:3] == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    assert [len(rows) for rows in seen] == [3] * 8
    assert sorted(row for rows in seen for row in rows) == sorted(list(range(8)) * 3)


def test_a_row_of_a_huge_vocabulary_is_read_in_some_of_the_steps_alone() -> None:
    huge = HealthProbe(3 * LOGITS_PER_STEP)
    logits = np.zeros((2, 3 * LOGITS_PER_STEP), np.float32)
    seen = [[row for row, _ in huge.step(logits)] for _ in range(9)]
    assert seen == [[0], [], [], [1], [], [], [0], [], []]


def test_a_step_looks_at_no_row_twice() -> None:
    small = HealthProbe(16)
    assert sorted(row for row, _ in small.step(np.zeros((5, 16), np.float32))) == [0, 1, 2, 3, 4]
    assert list(small.step(np.zeros((0, 16), np.float32))) == []


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 4), st.integers(1, 20))
def test_the_ratio_kept_up_token_by_token_is_the_one_counted_anew(tokens: list[int], n: int, window: int) -> None:
    repetition = Repetition(n, window)
    for end, token in enumerate(tokens, 1):
        repetition.push(token)
        grams = [tuple(tokens[i : i + n]) for i in range(end - n + 1)][-window:]
        assert repetition.unique_ratio == (len(set(grams)) / len(grams) if grams else 1.0)


def test_a_loop_has_a_low_ratio_and_prose_a_high_one() -> None:
    loop, prose = Repetition(), Repetition()
    for i in range(200):
        loop.push(i % 4)
        prose.push(i)
    assert (loop.unique_ratio, prose.unique_ratio) == (4 / 64, 1.0)
