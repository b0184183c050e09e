"""The noise monitor: from what the step loop observes to what the model is told, noted and shown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dskd.engine.request import (
    BlockScore,
    HealthSample,
    LoopSnapshot,
    ModeRules,
    NonFinite,
    Observation,
    ScoringPlan,
)
from dskd.errors import ResourceExhaustedError, UnavailableError
from dskd.manager.types import HistoryEntry
from dskd.monitor import monitor as monitor_module
from dskd.monitor.bets import samples_to_trip
from dskd.monitor.config import LoadConfig, LongContextConfig, MonitorConfig, ThresholdConfig
from dskd.monitor.monitor import NoiseMonitor
from dskd.monitor.readings import MEMORY_TOKENS, RecentMean
from dskd.monitor.request_book import MAX_REQUESTS, SILENCE_S
from dskd.monitor.states import FallbackState, Repair, Scope
from dskd.monitor.types import ModeNoise, Served
from dskquant.modes import PrecisionMode

HEALTHY, TRIPPED, COOLING = FallbackState.HEALTHY, FallbackState.TRIPPED, FallbackState.COOLING
INT4, INT8, FP16, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP16, PrecisionMode.FP32

EXPECTED = {INT4: 0.1, INT8: 0.01}
CONFIG = MonitorConfig(dwell_s=10.0, max_dwell_s=80.0)
NOISY = 1.0  # KL of INT4 far above its threshold of 2 x 0.1
CALM = 0.1


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


class FakeModel:
    """Does what it is told at once, except for `make_ready`, which waits for `arrive` or `fail`. Keeps all calls."""

    def __init__(self, mode: PrecisionMode = INT4, resident: Iterable[PrecisionMode] = (INT4, INT8)) -> None:
        self.state = Served(1, mode, False, EXPECTED, frozenset(resident), LoopSnapshot())
        self.rules: list[tuple[ModeRules, bool]] = []
        self.plans: list[ScoringPlan | None] = []
        self.made_ready: list[PrecisionMode] = []
        self.let_gone: list[PrecisionMode] = []
        self.escalations: list[tuple[str, PrecisionMode, bool]] = []
        self.ended: set[str] = set()
        self.entries: list[HistoryEntry] = []
        self.broken = False
        self._builds: dict[PrecisionMode, asyncio.Future[None]] = {}

    def served(self) -> Served:
        return self.state

    async def make_ready(self, mode: PrecisionMode) -> None:
        self.made_ready.append(mode)
        self._builds[mode] = asyncio.get_running_loop().create_future()
        await self._builds[mode]

    def let_go(self, mode: PrecisionMode) -> None:
        self.let_gone.append(mode)

    async def set_rules(self, rules: ModeRules, repair: bool) -> None:
        if self.broken:
            raise UnavailableError("the loop is gone")
        self.rules.append((rules, repair))

    async def set_scoring(self, plan: ScoringPlan | None) -> None:
        self.plans.append(plan)

    async def escalate(self, request_id: str, mode: PrecisionMode, repair: bool) -> bool:
        if request_id in self.ended:
            return False
        self.escalations.append((request_id, mode, repair))
        return True

    def note(self, entry: HistoryEntry) -> None:
        self.entries.append(entry)

    def change(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    async def arrive(self, mode: PrecisionMode) -> None:
        """The mode that is being made ready has come into memory."""
        self.change(resident=self.state.resident | {mode})
        self._builds[mode].set_result(None)
        await settle()

    async def fail(self, mode: PrecisionMode, error: Exception) -> None:
        self._builds[mode].set_exception(error)
        await settle()

    @property
    def fallback(self) -> PrecisionMode | None:
        return self.rules[-1][0].fallback

    @property
    def held(self) -> list[PrecisionMode]:
        """Modes that are kept in memory for the monitor."""
        held = list(self.made_ready)
        for mode in self.let_gone:
            held.remove(mode)
        return held


async def settle() -> None:
    """Lets the tasks that can go on do so."""
    for _ in range(3):
        await asyncio.sleep(0)


class Bench:
    """A monitor under test, its model, and a clock that only tests move."""

    def __init__(self, config: MonitorConfig = CONFIG, model: FakeModel | None = None) -> None:
        self.now = 1000.0
        self.model = model or FakeModel()
        self.monitor = NoiseMonitor("m", config, self.model, clock=lambda: self.now)

    async def round(self, *observations: Observation, after_s: float = 0.0) -> None:
        """`after_s` seconds later, the monitor takes `observations` and decides."""
        self.now += after_s
        self.monitor.observe(list(observations))
        await self.monitor.decide()
        await settle()

    def score(
        self,
        kl: float | Iterable[float] = CALM,
        count: int = 32,
        mode: PrecisionMode = INT4,
        request_id: str = "r",
        *,
        agrees: bool = True,
        is_probe: bool = False,
        generation: int | None = None,
    ) -> BlockScore:
        values = np.full(count, kl) if isinstance(kl, float) else np.array(list(kl))
        return BlockScore(
            request_id,
            self.model.state.generation if generation is None else generation,
            mode,
            FP32 if FP32 in self.model.state.resident else INT8,
            is_probe,
            values,
            np.full(len(values), agrees),
            np.zeros(len(values), np.int64),
            np.full(len(values), self.now),
        )

    def non_finite(self, mode: PrecisionMode = INT4, request_id: str = "r") -> NonFinite:
        return NonFinite(request_id, self.model.state.generation, mode, INT8)

    async def trip(self) -> None:
        await self.round()
        await self.round(self.score(NOISY, 64))
        assert self.noise().state is TRIPPED

    def noise(self, mode: PrecisionMode = INT4, samples: int = 0) -> ModeNoise:
        return next(noise for noise in self.monitor.snapshot(samples).modes if noise.mode is mode)


# Scoring


@pytest.mark.parametrize(
    ("served", "resident", "given", "reference"),
    [
        (INT4, (INT4, INT8), None, INT8),
        (INT4, (INT4, INT8, FP32), None, FP32),
        (INT4, (INT4, INT8, FP32), INT8, INT8),
        (INT4, (INT4, INT8), FP32, INT8),  # what was asked for is not in memory
        (FP32, (INT4, INT8, FP32), INT8, FP32),  # what was asked for is no better than what serves
        (INT4, (INT4,), None, None),
    ],
)
@async_test
async def test_the_most_exact_mode_in_memory_scores_unless_told_otherwise(
    served: PrecisionMode,
    resident: tuple[PrecisionMode, ...],
    given: PrecisionMode | None,
    reference: PrecisionMode | None,
) -> None:
    config = replace(CONFIG, reference=given, share=0.1, time_share=0.02, own_context=True)
    bench = Bench(config, FakeModel(served, resident))
    await bench.round()
    expected = [] if reference is None else [ScoringPlan(reference, 0.1, 0.02, own_context=True)]
    assert bench.model.plans == expected
    assert bench.monitor.snapshot(0).reference is reference


@async_test
async def test_the_reference_follows_what_comes_into_memory() -> None:
    bench = Bench()
    await bench.round()
    bench.model.change(resident=frozenset({INT4, INT8, FP32}))
    await bench.round()
    await bench.round()
    assert [plan.reference for plan in bench.model.plans if plan] == [INT8, FP32]


@async_test
async def test_nothing_is_scored_with_a_share_of_zero() -> None:
    bench = Bench(replace(CONFIG, share=0.0))
    await bench.round()
    assert bench.model.plans == []


# Rules


@async_test
async def test_the_rules_of_the_configuration_are_told_once_at_the_start() -> None:
    config = replace(CONFIG, prefill=INT8, long_context=LongContextConfig(1000, INT8))
    bench = Bench(config)
    await bench.round()
    await bench.round()
    assert bench.model.rules == [(ModeRules(config), False)]


@async_test
async def test_what_the_loop_refused_is_told_again_and_noted_when_it_holds() -> None:
    bench = Bench()
    await bench.round()
    bench.model.broken = True
    with pytest.raises(UnavailableError):
        await bench.round(bench.score(NOISY, 64))
    assert bench.model.entries == []
    bench.model.broken = False
    await bench.round()
    assert bench.model.fallback is INT8
    assert [entry.outcome for entry in bench.model.entries] == ["committed"]


# Falling back


@async_test
async def test_a_noisy_mode_is_replaced_at_once_by_what_is_in_memory_and_by_the_target_when_it_is_ready() -> None:
    bench = Bench()
    await bench.trip()
    assert bench.model.fallback is INT8
    assert bench.model.held == [FP32]
    assert bench.monitor.snapshot(0).fallback is INT8
    await bench.model.arrive(FP32)
    await bench.round()
    assert bench.model.fallback is FP32
    assert [(entry.from_mode, entry.to_mode) for entry in bench.model.entries] == [(INT4, INT8), (INT8, FP32)]
    assert {(entry.kind, entry.outcome, entry.actor) for entry in bench.model.entries} == {
        ("fallback", "committed", "monitor")
    }


@async_test
async def test_noise_trips_after_as_many_samples_as_the_design_predicts() -> None:
    bench = Bench()
    await bench.round()
    rng = np.random.default_rng(7)
    predicted = samples_to_trip(0.4, 0.2, CONFIG.false_trip_samples)
    needed = 0
    while bench.noise().state is HEALTHY:
        needed += 4
        kl = rng.lognormal(math.log(0.4) - 0.32, 0.8, 4)  # mean 0.4
        await bench.round(bench.score(kl.tolist()))
    assert predicted / 2 < needed < predicted * 2


@async_test
async def test_expected_noise_trips_nothing() -> None:
    bench = Bench()
    rng = np.random.default_rng(8)
    for _ in range(100):
        await bench.round(bench.score(rng.lognormal(math.log(0.1) - 0.32, 0.8, 64).tolist()), after_s=1)
    assert bench.noise().state is HEALTHY
    assert bench.model.entries == []


@async_test
async def test_the_history_tells_the_numbers_that_decided() -> None:
    bench = Bench()
    await bench.round()
    kl = np.linspace(0.8, 1.6, 64)
    await bench.round(bench.score(kl.tolist(), agrees=False))
    entry = bench.model.entries[0]
    low, high = bench.noise().statistics.low, bench.noise().statistics.high
    assert entry.model == "m"
    assert entry.reason.startswith(
        f"int4 healthy -> tripped: noise; mean KL {kl.mean():.4g} ({low:.4g} to {high:.4g}) over 64 samples, "
        "agreement 0.000, threshold 0.2, evidence of noise "
    )
    assert f"(needed: {math.log(100_000):.1f})" in entry.reason
    assert (entry.generation, entry.from_generation) == (1, 1)


@async_test
async def test_disagreement_trips_where_no_threshold_is_known() -> None:
    bench = Bench()
    bench.model.change(expected_kl={})
    await bench.round()
    for _ in range(4):
        await bench.round(bench.score(NOISY, 64, agrees=False))
    noise = bench.noise()
    assert (noise.state, noise.cause, noise.threshold) == (TRIPPED, "disagreement", None)


@async_test
async def test_one_non_finite_logit_trips() -> None:
    bench = Bench()
    await bench.round()
    await bench.round(bench.non_finite())
    noise = bench.noise()
    assert (noise.state, noise.cause, noise.non_finite, noise.trips) == (TRIPPED, "non-finite", 1, 1)
    assert bench.model.fallback is INT8


@async_test
async def test_a_configured_threshold_wins_over_the_expected_noise() -> None:
    bench = Bench(replace(CONFIG, threshold=ThresholdConfig(int4=2.0)))
    await bench.round()
    await bench.round(bench.score(NOISY, 512))
    assert bench.noise().state is HEALTHY
    assert bench.noise().threshold == 2.0


@async_test
async def test_repair_is_asked_for_when_a_fallback_raises_the_mode_and_only_then() -> None:
    bench = Bench(replace(CONFIG, repair=Repair.REPREFILL))
    await bench.trip()
    await bench.model.arrive(FP32)
    await bench.round()
    bench.model.change(generation=2)
    await bench.round()
    assert [(rules.fallback, repair) for rules, repair in bench.model.rules] == [
        (None, False),
        (INT8, True),
        (FP32, True),
        (None, False),
    ]


@async_test
async def test_the_next_mode_is_the_target_if_configured_and_the_one_after_it_once_that_trips_too() -> None:
    bench = Bench(replace(CONFIG, target="next"))
    await bench.trip()
    assert (bench.model.fallback, bench.model.held) == (INT8, [INT8])
    await bench.round(bench.non_finite(INT8))
    assert bench.noise(INT8).state is TRIPPED
    assert FP16 in bench.model.held
    await bench.model.arrive(FP16)
    await bench.round()
    assert bench.model.fallback is FP16


@async_test
async def test_with_nothing_better_in_memory_the_mode_goes_on_until_the_target_is_ready() -> None:
    bench = Bench(model=FakeModel(INT4, [INT4]))
    await bench.round()
    await bench.round(bench.non_finite())
    assert bench.model.fallback is None
    assert bench.model.held == [FP32]
    await bench.model.arrive(FP32)
    await bench.round()
    assert bench.model.fallback is FP32


@async_test
async def test_a_target_that_cannot_be_made_ready_is_told_and_tried_again_after_the_dwell() -> None:
    bench = Bench()
    await bench.trip()
    await bench.model.fail(FP32, ResourceExhaustedError("memory", "needs 3 GiB, 1 GiB is free"))
    await bench.round(after_s=1)
    entry = bench.model.entries[-1]
    assert (entry.outcome, entry.from_mode, entry.to_mode) == ("rejected", INT8, FP32)
    assert "needs 3 GiB, 1 GiB is free" in entry.reason
    assert bench.model.fallback is INT8
    assert bench.model.held == []
    await bench.round(after_s=CONFIG.dwell_s - 0.5)
    assert bench.model.made_ready == [FP32]
    await bench.round(after_s=1)
    assert bench.model.held == [FP32]
    await bench.model.arrive(FP32)
    await bench.round()
    assert bench.model.fallback is FP32


@async_test
async def test_a_mode_that_the_model_does_not_serve_in_changes_nothing_when_it_trips() -> None:
    bench = Bench(model=FakeModel(INT8))
    await bench.round()
    await bench.round(bench.score(NOISY, 64))  # a request that asked for INT4
    assert bench.noise().state is TRIPPED
    assert bench.model.entries[-1].outcome == "suppressed"
    assert bench.model.fallback is None
    assert bench.model.held == []


@async_test
async def test_the_mode_of_prompts_falls_back_too() -> None:
    bench = Bench(replace(CONFIG, prefill=INT4), FakeModel(INT8, [INT4, INT8, FP32]))
    await bench.round()
    await bench.round(bench.score(NOISY, 64))
    assert bench.model.fallback is FP32


# Returning


@async_test
async def test_a_tripped_mode_is_scored_in_the_shadow_of_its_fallback_and_returns_when_its_noise_is_gone() -> None:
    bench = Bench()
    await bench.trip()
    await bench.model.arrive(FP32)
    await bench.round()
    assert bench.model.plans[-1] == ScoringPlan(FP32, CONFIG.share, CONFIG.time_share, probe=INT4)
    await bench.round(bench.score(0.01, 200, is_probe=True), after_s=CONFIG.dwell_s / 2)
    assert bench.noise().state is TRIPPED
    await bench.round(after_s=CONFIG.dwell_s / 2)
    assert bench.noise().state is COOLING
    assert bench.model.fallback is None
    assert bench.model.held == []
    assert (bench.model.entries[-1].from_mode, bench.model.entries[-1].to_mode) == (FP32, INT4)
    plan = bench.model.plans[-1]
    assert plan is not None
    assert plan.probe is None
    await bench.round(bench.score(0.01, 200), after_s=1)
    assert bench.noise().state is HEALTHY
    assert "trial passed" in bench.model.entries[-1].reason


@async_test
async def test_noise_that_stays_keeps_the_fallback_however_long() -> None:
    bench = Bench()
    await bench.trip()
    for _ in range(50):
        await bench.round(bench.score(NOISY, 32, is_probe=True), after_s=CONFIG.dwell_s)
    assert bench.noise().state is TRIPPED
    assert bench.model.fallback is INT8


@async_test
async def test_samples_from_before_the_trip_are_no_evidence_that_noise_is_gone() -> None:
    bench = Bench()
    await bench.round()
    late = bench.score(0.01, 500)
    bench.now += 1
    await bench.round(bench.score(NOISY, 64))
    await bench.round(late, after_s=CONFIG.dwell_s)
    assert bench.noise().state is TRIPPED


@async_test
async def test_without_any_scoring_the_mode_is_tried_again_once_a_dwell() -> None:
    bench = Bench(replace(CONFIG, share=0.0))
    await bench.round()
    await bench.round(bench.non_finite())
    await bench.round(after_s=CONFIG.dwell_s - 1)
    assert bench.model.fallback is INT8
    await bench.round(after_s=1)
    assert bench.noise().state is COOLING
    assert bench.model.fallback is None
    await bench.round(after_s=CONFIG.dwell_s)
    assert bench.noise().state is HEALTHY


@async_test
async def test_a_new_generation_serves_at_once_on_trial_with_a_threshold_of_its_own() -> None:
    bench = Bench()
    await bench.trip()
    bench.model.change(generation=2, expected_kl={INT4: 0.3})
    bench.monitor.renew()
    await bench.round()
    noise = bench.noise()
    assert (noise.state, noise.threshold, noise.statistics.samples) == (COOLING, 0.6, 0)
    assert bench.model.fallback is None
    assert bench.model.held == []
    entry = bench.model.entries[-1]
    assert (entry.generation, entry.from_mode, entry.to_mode) == (2, INT8, INT4)
    assert "new generation; mean KL 1 " in entry.reason


@async_test
async def test_scores_of_an_old_generation_are_dropped() -> None:
    bench = Bench()
    await bench.round()
    bench.model.change(generation=2)
    await bench.round(bench.score(NOISY, 500, generation=1))
    assert bench.noise().total_samples == 0
    assert bench.noise().state is HEALTHY


# A pin


@async_test
async def test_a_pin_suppresses_the_fallback_and_that_is_told() -> None:
    bench = Bench()
    bench.model.change(pinned=True)
    await bench.trip()
    entry = bench.model.entries[-1]
    assert (entry.outcome, entry.from_mode, entry.to_mode) == ("suppressed", INT4, INT4)
    assert "an operator has pinned int4" in entry.reason
    assert bench.model.rules[-1][0].pin is INT4
    assert bench.model.held == []
    snapshot = bench.monitor.snapshot(0)
    assert (snapshot.pin, snapshot.fallback) == (INT4, None)


@async_test
async def test_when_the_pin_is_taken_away_the_fallback_serves_at_once() -> None:
    bench = Bench()
    bench.model.change(pinned=True)
    await bench.trip()
    bench.model.change(pinned=False)
    await bench.round()
    assert bench.model.rules[-1][0] == ModeRules(CONFIG, fallback=INT8)
    assert bench.model.held == [FP32]
    assert (bench.model.entries[-1].outcome, bench.model.entries[-1].to_mode) == ("committed", INT8)


@async_test
async def test_a_pinned_noisy_mode_is_scored_as_it_serves_and_recovers() -> None:
    bench = Bench()
    bench.model.change(pinned=True)
    await bench.trip()
    assert bench.model.plans == [ScoringPlan(INT8, CONFIG.share, CONFIG.time_share)]
    await bench.round(bench.score(0.01, 200), after_s=CONFIG.dwell_s)
    assert bench.noise().state is COOLING


# Whatever happens


async def happen(bench: Bench, event: str) -> None:
    """One of the things that the world does to a monitor."""
    model, tripped = bench.model, bench.noise().state is TRIPPED
    if event in ("pin", "unpin"):
        model.change(pinned=event == "pin")
    elif event == "new generation":
        model.change(generation=model.state.generation + 1)
    elif event == "fp32 comes":
        model.change(resident=model.state.resident | {FP32})
    elif event == "fp32 goes":
        model.change(resident=model.state.resident - {FP32})
    kl = {"noise": NOISY, "calm": 0.01}.get(event)
    scores = [] if kl is None else [bench.score(kl, 200, is_probe=tripped)]
    model.broken = event == "the loop is gone"
    with contextlib.suppress(UnavailableError):
        await bench.round(*scores, after_s=CONFIG.dwell_s / 3)
    model.broken = False


EVENTS = ("noise", "calm", "pin", "unpin", "new generation", "fp32 comes", "fp32 goes", "the loop is gone", "nothing")


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
@settings(max_examples=60, deadline=None)
@async_test
async def test_what_holds_always_follows_from_the_state_and_the_last_word_of_the_history_is_what_serves(
    events: list[str],
) -> None:
    bench = Bench()
    await bench.round()
    for event in events:
        await happen(bench, event)
    await bench.round()
    model, state = bench.model, bench.noise().state
    best = FP32 if FP32 in model.state.resident else INT8
    assert model.rules[-1][0] == ModeRules(
        CONFIG, best if state is TRIPPED else None, pin=INT4 if model.state.pinned else None
    )
    assert model.held == ([FP32] if state is TRIPPED and not model.state.pinned else [])
    bent = [entry for entry in model.entries if entry.outcome == "committed" and entry.from_mode is not entry.to_mode]
    if not model.state.pinned and bent and "unpin" not in events:
        assert bent[-1].to_mode is (best if state is TRIPPED else INT4)


# Single requests

OWN = replace(CONFIG, scope=Scope.REQUEST, repair=Repair.REPREFILL)


@async_test
async def test_only_the_request_that_suffers_is_escalated() -> None:
    bench = Bench(OWN)
    await bench.round()
    calm = [bench.score(CALM, 64, request_id=f"calm-{index}") for index in range(7)]
    await bench.round(bench.score(NOISY, 64, request_id="hard"), *calm)
    assert bench.model.escalations == [("hard", INT8, True)]
    assert bench.model.held == [FP32]
    assert bench.model.fallback is None
    assert bench.noise().state is HEALTHY
    assert bench.monitor.snapshot(0).escalated_requests == 1
    await bench.model.arrive(FP32)
    await bench.round()
    assert bench.model.escalations[1:] == [("hard", FP32, True)]
    entry = bench.model.entries[-1]
    assert entry.reason.startswith("request hard: int4 healthy -> tripped: noise; mean KL 1 ")
    assert (entry.from_mode, entry.to_mode, entry.outcome) == (INT4, INT8, "committed")


@async_test
async def test_the_target_is_let_go_when_no_escalated_request_is_open() -> None:
    bench = Bench(OWN)
    await bench.round()
    await bench.round(bench.score(NOISY, 64, request_id="a"), bench.score(NOISY, 64, request_id="b"))
    bench.monitor.forget("a")
    await bench.round()
    assert bench.model.held == [FP32]
    bench.monitor.forget("b")
    await bench.round()
    assert bench.model.held == []
    assert bench.monitor.snapshot(0).escalated_requests == 0


@async_test
async def test_the_target_of_an_escalated_request_is_made_ready_for_a_new_generation_too() -> None:
    bench = Bench(OWN)
    await bench.round()
    await bench.round(bench.score(NOISY, 64))
    await bench.model.arrive(FP32)
    await bench.round()
    bench.model.change(generation=2, resident=frozenset({INT4, INT8}))
    await bench.round()
    await bench.round()
    assert bench.model.made_ready == [FP32, FP32]
    assert bench.model.held == [FP32]
    bench.model.change(generation=3, resident=frozenset({INT4, INT8, FP32}))
    await bench.round()
    assert bench.model.made_ready == [FP32, FP32]


@async_test
async def test_a_probe_says_nothing_of_a_request_that_another_mode_serves() -> None:
    bench = Bench(replace(OWN, load=LoadConfig(INT4, queue=4, max_kl=0.2)), FakeModel(INT8))
    await bench.round()
    await bench.round(bench.score(NOISY, 64, is_probe=True))
    assert bench.model.escalations == []
    assert bench.noise().total_samples == 64


@async_test
async def test_a_request_that_has_ended_meanwhile_is_not_escalated() -> None:
    bench = Bench(OWN)
    bench.model.ended.add("r")
    await bench.round()
    await bench.round(bench.score(NOISY, 64))
    assert bench.model.escalations == []
    assert bench.model.held == []


@async_test
async def test_a_request_is_forgotten_after_a_long_silence_and_health_breaks_it() -> None:
    bench = Bench(OWN)
    await bench.round()
    await bench.round(bench.score(NOISY, 64))
    await bench.round(HealthSample("r", 1, FP32, 1.0, 1.0, 1.0), after_s=SILENCE_S - 1)
    await bench.round(after_s=SILENCE_S - 1)
    assert bench.monitor.snapshot(0).escalated_requests == 1
    await bench.round(after_s=2)
    assert bench.monitor.snapshot(0).escalated_requests == 0
    assert bench.model.held == []


@async_test
async def test_a_silent_request_is_forgotten_whoever_else_is_heard_of() -> None:
    bench = Bench(OWN)
    await bench.round()
    await bench.round(bench.score(NOISY, 64, request_id="heard"), bench.score(NOISY, 64, request_id="silent"))
    await bench.round(HealthSample("heard", 1, FP32, 1.0, 1.0, 1.0), after_s=SILENCE_S - 1)
    await bench.round(after_s=2)
    assert bench.monitor.snapshot(0).escalated_requests == 1


@async_test
async def test_requests_are_remembered_in_bounded_number() -> None:
    bench = Bench(OWN)
    await bench.round()
    await bench.round(bench.score(NOISY, 64, request_id="first"))
    health = [HealthSample(f"r-{index}", 1, INT4, 1.0, 1.0, 1.0) for index in range(MAX_REQUESTS)]
    await bench.round(*health)
    assert bench.monitor.snapshot(0).escalated_requests == 0


@async_test
async def test_a_pin_keeps_requests_from_being_escalated() -> None:
    bench = Bench(OWN)
    bench.model.change(pinned=True)
    await bench.round()
    await bench.round(bench.score(NOISY, 64))
    assert bench.model.escalations == []
    assert bench.model.entries[-1].outcome == "suppressed"


# The load rule

LOAD = replace(CONFIG, load=LoadConfig(INT4, queue=4, max_kl=0.2, quiet_s=5.0))


async def wait_in_line(bench: Bench, waiting: int, after_s: float = 0.0) -> None:
    bench.model.change(loop=LoopSnapshot(waiting=waiting))
    await bench.round(after_s=after_s)


@async_test
async def test_a_long_queue_lowers_the_mode_and_quiet_raises_it_again() -> None:
    bench = Bench(LOAD, FakeModel(INT8))
    await wait_in_line(bench, 4)
    assert not bench.model.rules[-1][0].lowered
    await wait_in_line(bench, 5)
    assert bench.model.rules[-1] == (ModeRules(LOAD, lowered=True), False)
    assert bench.monitor.snapshot(0).lowered
    await wait_in_line(bench, 0, after_s=1)
    await wait_in_line(bench, 0, after_s=5)
    assert not bench.model.rules[-1][0].lowered
    assert [(entry.kind, entry.from_mode, entry.to_mode) for entry in bench.model.entries] == [
        ("switch", INT8, INT4),
        ("switch", INT4, INT8),
    ]
    assert bench.model.entries[0].reason == "5 requests wait, limit 4; mean KL of int4 0.1, limit 0.2"


@async_test
async def test_the_lower_mode_is_scored_beforehand_and_not_used_when_it_is_too_noisy() -> None:
    bench = Bench(LOAD, FakeModel(INT8))
    await wait_in_line(bench, 0)
    assert bench.model.plans[-1] == ScoringPlan(INT8, CONFIG.share, CONFIG.time_share, probe=INT4)
    await bench.round(bench.score(0.21, 64, is_probe=True))
    await wait_in_line(bench, 5)
    assert not bench.model.rules[-1][0].lowered


@async_test
async def test_a_lower_mode_that_is_not_in_memory_is_not_used() -> None:
    bench = Bench(LOAD, FakeModel(INT8, [INT8]))
    await wait_in_line(bench, 5)
    assert not bench.model.rules[-1][0].lowered


@async_test
async def test_noise_found_while_lowered_raises_the_mode_at_once() -> None:
    bench = Bench(LOAD, FakeModel(INT8))
    await wait_in_line(bench, 5)
    await bench.round(bench.non_finite())
    assert not bench.model.rules[-1][0].lowered
    assert bench.model.rules[-1][0].fallback is None  # INT8 is well, so nothing else is needed
    assert "mean KL of int4 inf" in bench.model.entries[-1].reason


# What is seen


@async_test
async def test_the_snapshot_holds_the_statistics_of_the_window() -> None:
    bench = Bench()
    await bench.round()
    kl = np.random.default_rng(3).lognormal(-2.5, 0.8, 300)
    await bench.round(bench.score(kl.tolist()))
    noise = bench.noise(samples=5)
    p50, p90, p99 = np.quantile(kl, (0.5, 0.9, 0.99))
    statistics = noise.statistics
    assert (statistics.mean, statistics.p50, statistics.p90, statistics.p99) == pytest.approx(
        (kl.mean(), p50, p90, p99), rel=1e-12
    )
    assert statistics.low < kl.mean() < statistics.high
    assert (noise.total_samples, statistics.samples, statistics.agreement) == (300, 300, 1.0)
    assert [point.kl for point in noise.latest] == kl[-5:].tolist()
    assert noise.threshold == 0.2
    assert noise.evidence < noise.evidence_needed == math.log(CONFIG.false_trip_samples)


@async_test
async def test_the_snapshot_shows_modes_with_a_threshold_or_scores_the_least_exact_first() -> None:
    bench = Bench()
    await bench.round()
    assert [noise.mode for noise in bench.monitor.snapshot(0).modes] == [INT4, INT8]
    await bench.round(bench.score(mode=FP16))
    assert [noise.mode for noise in bench.monitor.snapshot(0).modes] == [INT4, INT8, FP16]
    assert bench.monitor.snapshot(0).modes[0].latest == ()


@async_test
async def test_health_is_averaged_for_each_mode_of_the_generation_that_serves() -> None:
    bench = Bench()
    await bench.round()
    entropies = [1.0, 2.0, 6.0]
    await bench.round(*(HealthSample("r", 1, INT4, entropy, 2 * entropy, 0.5) for entropy in entropies))
    noise = bench.noise()
    assert (noise.entropy, noise.margin, noise.unique_ngrams) == (3.0, 6.0, 0.5)
    assert math.isnan(bench.noise(INT8).entropy)
    bench.model.change(generation=2)
    await bench.round()
    assert math.isnan(bench.noise().entropy)


def test_means_of_health_follow_the_latest_tokens() -> None:
    mean = RecentMean()
    for value in (1.0, math.nan, 3.0):
        mean.push(value)
    assert mean.value == 2.0
    for _ in range(100 * MEMORY_TOKENS):
        mean.push(7.0)
    assert mean.value == pytest.approx(7.0)


@async_test
async def test_positions_that_only_a_probe_found_not_finite_are_counted() -> None:
    bench = Bench()
    await bench.round()
    await bench.round(bench.non_finite())
    await bench.round(bench.score([0.1, math.inf, math.inf], is_probe=True), bench.score([math.inf]))
    assert bench.noise().non_finite == 3


# Another configuration


@async_test
async def test_another_threshold_holds_from_the_next_round_on_and_a_fallback_stays() -> None:
    bench = Bench()
    await bench.trip()
    bench.monitor.configure(replace(CONFIG, threshold=ThresholdConfig(int4=0.5)))
    await bench.round()
    noise = bench.noise()
    assert (noise.state, noise.threshold, noise.trips) == (TRIPPED, 0.5, 1)
    assert bench.model.rules[-1][0].config.threshold.int4 == 0.5
    assert bench.model.fallback is INT8


@async_test
async def test_another_scope_ends_a_fallback() -> None:
    bench = Bench()
    await bench.trip()
    bench.monitor.configure(OWN)
    await bench.round()
    assert bench.model.fallback is None
    assert bench.model.held == []


# Running


class Told(FakeModel):
    """Says when something was noted."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = asyncio.Event()

    def note(self, entry: HistoryEntry) -> None:
        super().note(entry)
        self.noted.set()


@async_test
async def test_while_it_runs_scores_are_decided_on_at_once() -> None:
    bench = Bench(model=(model := Told()))
    running = asyncio.create_task(bench.monitor.run())
    bench.monitor.renew()
    await settle()
    bench.monitor.observe([bench.score(NOISY, 64)])
    await model.noted.wait()
    assert model.fallback is INT8
    running.cancel()
    await asyncio.wait([running])
    bench.monitor.close()
    assert model.held == []


@async_test
async def test_it_runs_on_after_a_round_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "TICK_S", 0.0)
    bench = Bench(model=(model := Told()))
    model.broken = True
    running = asyncio.create_task(bench.monitor.run())
    bench.monitor.observe([bench.non_finite()])
    await settle()
    assert model.entries == []
    model.broken = False
    await model.noted.wait()
    assert model.fallback is INT8
    running.cancel()
    await asyncio.wait([running])
