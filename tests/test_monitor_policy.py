"""The fallback: trips on evidence, returns when the noise is gone, never flaps, and leaves an operator's pin alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dskd.monitor.bets import TYPICAL_SIGMA, samples_to_trip
from dskd.monitor.config import MonitorConfig, ThresholdConfig
from dskd.monitor.noise import NoiseWatch
from dskd.monitor.policy import (
    RETURN_EVIDENCE,
    Fallback,
    Signals,
    Transition,
    advance,
    evidence_needed,
    renew,
    stand_in,
    target_of,
    threshold_of,
)
from dskd.monitor.states import Cause, FallbackState, Scope
from dskd.monitor.window import NoiseSample
from dskquant.modes import PrecisionMode

HEALTHY, TRIPPED, COOLING = FallbackState.HEALTHY, FallbackState.TRIPPED, FallbackState.COOLING
INT4, INT8, FP16, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP16, PrecisionMode.FP32

CONFIG = MonitorConfig(dwell_s=10.0, max_dwell_s=80.0)
ENOUGH = math.log(CONFIG.false_trip_samples)
NOISY = Signals(noise=ENOUGH)
GONE = Signals(noise=-5.0, recovery=RETURN_EVIDENCE)
QUIET = Signals()

signals = st.builds(
    Signals,
    noise=st.sampled_from([-3.0, 5.0, 8.0, 12.0]),
    disagreement=st.sampled_from([-3.0, 0.0, 8.0, 12.0]),
    recovery=st.sampled_from([None, -3.0, 2.0, 5.0]),
    non_finite=st.sampled_from([0, 0, 0, 1]),
)
traces = st.lists(st.tuples(st.floats(0.01, 30.0), signals, st.booleans()), max_size=60)


def follow(*steps: tuple[float, Signals], config: MonitorConfig = CONFIG) -> list[tuple[float, FallbackState]]:
    """The transitions of a fallback that sees these signals at these times."""
    fallback, seen = Fallback(), []
    for now, given_signals in steps:
        fallback, transition = advance(fallback, given_signals, now, config)
        if transition:
            seen.append((now, transition.after))
    return seen


def run(trace: list[tuple[float, Signals, bool]], config: MonitorConfig) -> list[tuple[float, Fallback, Transition]]:
    fallback, now, seen = Fallback(), 0.0, []
    for wait, given_signals, pinned in trace:
        now += wait
        fallback, transition = advance(fallback, given_signals, now, config, pinned=pinned)
        if transition:
            seen.append((now, fallback, transition))
    return seen


def test_a_whole_round_trip_and_back() -> None:
    seen = follow((1, QUIET), (2, NOISY), (5, GONE), (11, GONE), (12, GONE), (13, QUIET), (14, GONE))
    assert seen == [(2, TRIPPED), (12, COOLING), (14, HEALTHY)]


@pytest.mark.parametrize(
    ("given_signals", "cause"),
    [
        (NOISY, Cause.NOISE),
        (Signals(disagreement=ENOUGH), Cause.DISAGREEMENT),
        (Signals(non_finite=1), Cause.NON_FINITE),
    ],
)
def test_each_cause_trips_by_itself_and_is_named(given_signals: Signals, cause: Cause) -> None:
    fallback, transition = advance(Fallback(), given_signals, 5.0, CONFIG)
    assert (fallback.state, fallback.cause, fallback.since, fallback.trips) == (TRIPPED, cause, 5.0, 1)
    assert transition == Transition(HEALTHY, TRIPPED, cause.value, suppressed=False)
    assert transition.changes_mode


def test_evidence_just_short_of_enough_changes_nothing() -> None:
    almost = math.nextafter(ENOUGH, 0)
    fallback = Fallback()
    assert advance(fallback, Signals(noise=almost, disagreement=almost), 1.0, CONFIG) == (fallback, None)


def test_noise_that_is_not_gone_keeps_the_fallback_however_long() -> None:
    assert follow((0, NOISY), (1e6, QUIET), (2e6, NOISY)) == [(0, TRIPPED)]


def test_disagreement_alone_keeps_the_fallback_too() -> None:
    for gone in (GONE, Signals(recovery=None)):
        assert follow((0, NOISY), (100, replace(gone, disagreement=8.0)), (101, gone)) == [(0, TRIPPED), (101, COOLING)]


def test_a_mode_that_cannot_be_scored_is_tried_after_the_dwell_and_trusted_after_another() -> None:
    blind = Signals(recovery=None)
    seen = follow((0, NOISY), (9.9, blind), (10, blind), (19.9, blind), (20, blind))
    assert seen == [(0, TRIPPED), (10, COOLING), (20, HEALTHY)]
    transition = advance(Fallback(TRIPPED, since=0.0), blind, 10.0, CONFIG)[1]
    assert transition is not None
    assert transition.reason == "tried again, as its noise is not measured"


def test_on_trial_less_evidence_trips_and_at_once() -> None:
    suspicious = Signals(noise=ENOUGH - math.log(100))
    assert follow((0, suspicious), (1, NOISY), (11, GONE), (11.001, suspicious)) == [
        (1, TRIPPED),
        (11, COOLING),
        (11.001, TRIPPED),
    ]


def test_dwell_doubles_while_trials_fail_up_to_its_limit_and_starts_again_after_a_long_good_time() -> None:
    fallback, now, dwells = Fallback(), 0.0, []
    for _ in range(6):
        fallback, _ = advance(fallback, NOISY, now, CONFIG)
        dwells.append(fallback.dwell_s)
        early, _ = advance(fallback, GONE, now + fallback.dwell_s - 0.01, CONFIG)
        assert early.is_tripped
        now += fallback.dwell_s
        fallback, _ = advance(fallback, GONE, now, CONFIG)
        assert fallback.state is COOLING
    assert dwells == [10, 20, 40, 80, 80, 80]
    fallback, _ = advance(fallback, GONE, now + 1, CONFIG)
    assert advance(fallback, NOISY, now + 79, CONFIG)[0].dwell_s == 80
    assert advance(fallback, NOISY, now + 81, CONFIG)[0].dwell_s == 10


def test_a_trial_that_fails_late_has_failed_all_the_same() -> None:
    fallback = Fallback(COOLING, since=0.0, dwell_s=20.0, returned=0.0)
    assert advance(fallback, NOISY, 1e6, CONFIG)[0].dwell_s == 40


def test_a_new_generation_is_tried_at_once_and_with_the_first_dwell() -> None:
    tripped = Fallback(TRIPPED, since=100.0, cause=Cause.NOISE, dwell_s=80.0, trips=4)
    fallback, transition = renew(tripped, 101.0, CONFIG)
    assert transition == Transition(TRIPPED, COOLING, "new generation", suppressed=False)
    again, _ = advance(fallback, NOISY, 102.0, CONFIG)
    assert (again.state, again.dwell_s, again.trips) == (TRIPPED, 10.0, 5)
    assert renew(Fallback(), 1.0, CONFIG) == (Fallback(), None)


def test_a_request_stays_escalated_to_its_end() -> None:
    config = replace(CONFIG, scope=Scope.REQUEST)
    assert follow((0, NOISY), (1e6, GONE), (2e6, Signals(recovery=None)), config=config) == [(0, TRIPPED)]
    tripped = Fallback(TRIPPED, since=0.0)
    assert renew(tripped, 5.0, config) == (tripped, None)


def test_a_request_is_escalated_on_less_evidence_than_a_model_but_not_on_less_than_some() -> None:
    enough = Signals(noise=math.log(CONFIG.false_trip_samples / 100))
    assert follow((0, enough)) == []
    assert follow((0, enough), config=replace(CONFIG, scope=Scope.REQUEST)) == [(0, TRIPPED)]
    careless = MonitorConfig(false_trip_samples=50.0, scope=Scope.REQUEST)
    assert evidence_needed(HEALTHY, careless) == math.log(10)


@given(traces)
def test_returns_are_a_dwell_apart_and_a_fallback_lasts_at_least_its_dwell(
    trace: list[tuple[float, Signals, bool]],
) -> None:
    seen = run(trace, CONFIG)
    returns = [now for now, _, transition in seen if transition.before is TRIPPED]
    assert all(later - sooner >= CONFIG.dwell_s for sooner, later in itertools.pairwise(returns))
    for (tripped_at, tripped, _), (left_at, _, transition) in itertools.pairwise(seen):
        if transition.before is TRIPPED:
            assert CONFIG.dwell_s <= tripped.dwell_s <= CONFIG.max_dwell_s
            assert left_at - tripped_at >= tripped.dwell_s


@given(traces)
def test_a_tripped_mode_comes_back_only_on_trial(trace: list[tuple[float, Signals, bool]]) -> None:
    allowed = {(HEALTHY, TRIPPED), (TRIPPED, COOLING), (COOLING, TRIPPED), (COOLING, HEALTHY)}
    seen = run(trace, CONFIG)
    assert {(transition.before, transition.after) for *_, transition in seen} <= allowed
    assert all(first.after is second.before for (*_, first), (*_, second) in itertools.pairwise(seen))


@given(traces)
def test_whatever_happened_it_is_healthy_soon_after_the_noise_is_gone(trace: list[tuple[float, Signals, bool]]) -> None:
    calm = [(1.0, GONE, False)] * int(CONFIG.max_dwell_s + 2)
    fallback = run([*trace, (1.0, NOISY, False), *calm], CONFIG)[-1][1]
    assert fallback.state is HEALTHY


@given(traces)
def test_a_pin_suppresses_every_action_and_no_state(trace: list[tuple[float, Signals, bool]]) -> None:
    free = run([(wait, given_signals, False) for wait, given_signals, _ in trace], CONFIG)
    mixed = run(trace, CONFIG)
    pinned = run([(wait, given_signals, True) for wait, given_signals, _ in trace], CONFIG)
    states = [(now, fallback) for now, fallback, _ in free]
    assert [(now, fallback) for now, fallback, _ in mixed] == states
    assert [(now, fallback) for now, fallback, _ in pinned] == states
    assert not any(transition.changes_mode for *_, transition in pinned)
    assert all(transition.suppressed for *_, transition in pinned)


# With samples: the watch of a mode


def observe(watch: NoiseWatch, mean: float, count: int, random: np.random.Generator, now: float) -> list[Transition]:
    """`count` scored tokens of lognormal noise, one every 100 ms from `now` on."""
    seen = []
    for i in range(count):
        kl = float(random.lognormal(math.log(mean) - TYPICAL_SIGMA**2 / 2, TYPICAL_SIGMA))
        made = now + 0.1 * i
        watch.observe(NoiseSample(kl, bool(random.random() > min(mean, 0.9) / 2), made))
        transition = watch.advance(made, is_scored=True)
        if transition:
            seen.append(transition)
    return seen


def test_a_damaged_mode_trips_when_predicted_and_comes_back_by_itself_when_repaired() -> None:
    random = np.random.default_rng(7)
    watch = NoiseWatch(CONFIG, threshold=0.6)
    assert observe(watch, 0.3, 2000, random, 0.0) == []
    predicted = samples_to_trip(3.0, 0.6, CONFIG.false_trip_samples)
    seen = observe(watch, 3.0, int(3 * predicted), random, 200.0)
    assert [transition.after for transition in seen] == [TRIPPED]
    assert observe(watch, 3.0, 3000, random, 300.0) == []  # still scored, still noisy, well beyond the dwell
    seen = observe(watch, 0.3, 1500, random, 700.0)
    assert [transition.after for transition in seen] == [COOLING, HEALTHY]


def test_the_new_parameters_of_a_generation_are_judged_by_their_own_samples_and_threshold() -> None:
    random = np.random.default_rng(8)
    watch = NoiseWatch(CONFIG, threshold=0.6)
    observe(watch, 3.0, 100, random, 0.0)
    assert watch.fallback.is_tripped
    transition = watch.renew(10.0, 0.02)
    assert transition is not None
    assert transition.reason == "new generation"
    assert watch.statistics(10.0).samples == 0
    fresh = watch.signals(is_scored=True)
    watch.observe(NoiseSample(0.0, agrees=True, made=9.9))
    assert watch.signals(is_scored=True) == fresh
    assert [t.after for t in observe(watch, 0.01, 800, random, 10.0)] == [HEALTHY]
    assert [t.after for t in observe(watch, 0.1, 800, random, 100.0)] == [TRIPPED]


def test_a_sample_from_before_the_last_change_is_no_evidence() -> None:
    watch = NoiseWatch(CONFIG, threshold=0.6)
    watch.note_non_finite()
    watch.advance(100.0, is_scored=True)
    before = watch.signals(is_scored=True)
    watch.observe(NoiseSample(math.inf, agrees=False, made=99.9))
    assert watch.signals(is_scored=True) == before
    watch.observe(NoiseSample(math.inf, agrees=False, made=100.0))
    assert watch.signals(is_scored=True).noise > before.noise


def test_without_a_threshold_only_disagreement_and_non_finite_values_count() -> None:
    watch = NoiseWatch(CONFIG, threshold=None)
    for i in range(26):
        watch.observe(NoiseSample(50.0, agrees=True, made=float(i)))
        assert watch.advance(float(i), is_scored=True) is None
    made = 26.0
    while watch.advance(made, is_scored=True) is None:
        made += 1
        watch.observe(NoiseSample(0.0, agrees=False, made=made))
    # disagreement limit 0.5, every bet wins at most 1.5 a sample: ln(5 x 100,000) / ln 1.5 = 32.4
    assert (watch.fallback.cause, made) == (Cause.DISAGREEMENT, 26 + 33)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.05, 0.3, 0.6, 2.0, 8.0]), st.integers(1, 200)), max_size=5), st.integers())
def test_random_noise_never_makes_it_flap_and_calm_always_heals_it(levels: list[tuple[float, int]], seed: int) -> None:
    random, now = np.random.default_rng(abs(seed)), 0.0
    watch = NoiseWatch(replace(CONFIG, false_trip_samples=1000.0), threshold=0.6)
    trips = []
    for mean, count in levels:
        for step in range(count):
            trips += [now] * len(observe(watch, mean, 1, random, now)) * watch.fallback.is_tripped
            now += 0.1 if step % 7 else 2.0
    assert all(later - sooner >= CONFIG.dwell_s for sooner, later in itertools.pairwise(trips))
    observe(watch, 0.05, 1000, random, now)
    assert watch.fallback.state is HEALTHY


# Thresholds and targets


def test_a_threshold_is_the_configured_one_or_the_factor_times_what_the_set_was_measured_to_have() -> None:
    config = MonitorConfig(threshold=ThresholdConfig(int8=0.05), factor=3.0)
    expected = {INT4: 0.2, INT8: 0.005}
    assert threshold_of(INT8, config, expected) == 0.05
    assert threshold_of(INT4, config, expected) == pytest.approx(0.6)
    assert threshold_of(FP16, config, expected) is None
    assert threshold_of(FP32, config, {}) is None
    assert threshold_of(INT4, config, {INT4: 0.0}) == 1e-6


@pytest.mark.parametrize(
    ("mode", "target", "resident", "expected"),
    [
        (INT4, "fp32", {INT4, INT8}, FP32),
        (INT4, "next", {INT4, INT8}, INT8),
        (INT4, "next", {INT4, FP32}, FP32),
        (INT4, "next", {INT4}, INT8),
        (INT8, "int8", {INT4, INT8, FP32}, FP32),
        (FP32, "fp32", {FP32}, None),
    ],
)
def test_targets(mode: PrecisionMode, target: str, resident: set[PrecisionMode], expected: PrecisionMode) -> None:
    assert target_of(mode, target, resident) is expected


@pytest.mark.parametrize(
    ("wanted", "resident", "expected"),
    [
        (FP32, {INT4, INT8, FP32}, FP32),
        (FP32, {INT4, INT8}, INT8),
        (INT8, {INT4, INT8, FP32}, INT8),
        (FP16, {INT4, INT8, FP32}, FP32),
        (FP32, {INT4}, INT4),
    ],
)
def test_the_best_resident_mode_serves_until_the_target_is_there(
    wanted: PrecisionMode, resident: set[PrecisionMode], expected: PrecisionMode
) -> None:
    assert stand_in(INT4, wanted, resident) is expected
