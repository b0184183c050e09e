"""Which mode serves: the precedence of all that has a say, and the load rule that does not swing."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dskd.monitor.config import LoadConfig, LongContextConfig, MonitorConfig
from dskd.monitor.rules import LoadState, Situation, advance_load, effective_mode
from dskd.monitor.states import Phase
from dskquant.modes import LADDER, PrecisionMode

INT4, INT8, FP16, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP16, PrecisionMode.FP32
LOAD = LoadConfig(INT4, queue=5, max_kl=0.5, quiet_s=30.0)
CONFIG = MonitorConfig(prefill=INT8, long_context=LongContextConfig(1000, FP16), load=LOAD)


def test_of_all_that_speak_the_first_in_precedence_wins() -> None:
    """Voices are taken away one by one, from the strongest to the weakest."""
    voices: dict[str, object] = {
        "requested": INT4,
        "pin": INT8,
        "fallback": FP32,
        "tokens": 1000,
        "lowered": True,
        "phase": Phase.PREFILL,
    }
    silent = {"requested": None, "pin": None, "fallback": None, "tokens": 999, "lowered": False, "phase": Phase.DECODE}
    chosen = []
    for name in [None, *voices]:
        if name:
            voices[name] = silent[name]
        chosen.append(effective_mode(Situation(FP16, **voices), CONFIG).mode)  # type: ignore[arg-type]
    assert chosen == [INT4, INT8, FP32, FP16, INT4, INT8, FP16]


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (Situation(INT8, Phase.DECODE, 10), "mode of the model"),
        (Situation(INT8, Phase.PREFILL, 10), "mode of prompts"),
        (Situation(INT8, Phase.DECODE, 10, lowered=True), "more than 5 requests waited"),
        (Situation(INT8, Phase.DECODE, 1000), "at least 1000 tokens"),
        (Situation(INT8, Phase.DECODE, 10, fallback=FP32), "fallback from a mode that is too noisy"),
        (Situation(INT8, Phase.DECODE, 10, pin=INT8), "pinned by an operator"),
        (Situation(INT8, Phase.DECODE, 10, requested=INT8), "asked for by the request"),
    ],
)
def test_every_choice_says_why(situation: Situation, reason: str) -> None:
    assert effective_mode(situation, CONFIG).reason == reason


def test_a_fallback_is_no_step_down_from_what_long_context_or_prompts_have_anyway() -> None:
    assert effective_mode(Situation(INT4, Phase.DECODE, 1000, fallback=INT8), CONFIG).mode is FP16
    config = MonitorConfig(prefill=FP32)
    assert effective_mode(Situation(INT4, Phase.PREFILL, 1, fallback=INT8), config).mode is FP32


def test_long_context_and_fallback_lower_nothing() -> None:
    assert effective_mode(Situation(FP32, Phase.DECODE, 1000), CONFIG).mode is FP32
    assert effective_mode(Situation(FP32, Phase.DECODE, 1, fallback=INT8), CONFIG).mode is FP32


def test_the_load_rule_lowers_and_never_raises() -> None:
    config = MonitorConfig(load=LoadConfig(INT8, queue=5, max_kl=0.5))
    assert effective_mode(Situation(FP32, Phase.DECODE, 1, lowered=True), config).mode is INT8
    assert effective_mode(Situation(INT4, Phase.DECODE, 1, lowered=True), config).mode is INT4


modes = st.sampled_from(LADDER)
situations = st.builds(
    Situation,
    modes,
    st.sampled_from(Phase),
    st.integers(0, 2000),
    fallback=st.none() | modes,
    lowered=st.booleans(),
)
configs = st.builds(
    MonitorConfig,
    prefill=st.none() | modes,
    long_context=st.none() | st.builds(LongContextConfig, st.integers(1, 2000), modes),
    load=st.none() | st.builds(LoadConfig, st.sampled_from([INT4, INT8]), st.just(5), st.just(0.5)),
)


@given(situations, configs)
def test_floors_hold_whatever_else_is_configured(situation: Situation, config: MonitorConfig) -> None:
    chosen = LADDER.index(effective_mode(situation, config).mode)
    if situation.fallback is not None:
        assert chosen >= LADDER.index(situation.fallback)
    if config.long_context is not None and situation.tokens >= config.long_context.tokens:
        assert chosen >= LADDER.index(config.long_context.mode)


@given(situations, configs, modes)
def test_a_pin_and_a_request_are_obeyed_to_the_letter(
    situation: Situation, config: MonitorConfig, asked: PrecisionMode
) -> None:
    pinned = Situation(situation.model_mode, situation.phase, situation.tokens, None, asked, situation.fallback, True)
    assert effective_mode(pinned, config).mode is asked
    requested = Situation(situation.model_mode, situation.phase, situation.tokens, asked, INT4, situation.fallback)
    assert effective_mode(requested, config).mode is asked


def test_the_load_rule_goes_down_at_once_and_up_after_a_quiet_time() -> None:
    state, lowered = LoadState(), []
    for now, waiting in [(0, 5), (1, 6), (2, 3), (3, 0), (20, 0), (25, 1), (26, 0), (55, 0), (56, 0), (57, 5)]:
        state = advance_load(state, waiting, 0.3, now, LOAD)
        lowered.append(state.lowered)
    assert lowered == [False, True, True, True, True, True, True, True, False, False]


def test_a_lower_mode_that_is_too_noisy_or_not_known_is_not_used() -> None:
    assert not advance_load(LoadState(), 50, 0.51, 0.0, LOAD).lowered
    assert not advance_load(LoadState(), 50, None, 0.0, LOAD).lowered
    assert not advance_load(LoadState(lowered=True), 50, 0.51, 0.0, LOAD).lowered
    assert advance_load(LoadState(), 50, 0.5, 0.0, LOAD).lowered


@given(st.lists(st.tuples(st.floats(0.01, 40.0), st.integers(0, 10)), max_size=80))
def test_the_load_rule_does_not_swing(trace: list[tuple[float, int]]) -> None:
    """Nobody has waited for `quiet_s` whenever it goes up, so two rises are that far apart."""
    state, now, rises, last_wait = LoadState(), 0.0, [], -math.inf
    for step, waiting in trace:
        now += step
        last_wait = now if waiting else last_wait
        following = advance_load(state, waiting, 0.1, now, LOAD)
        if state.lowered and not following.lowered:
            assert now - last_wait >= LOAD.quiet_s
            rises.append(now)
        state = following
    assert all(later - sooner >= LOAD.quiet_s for sooner, later in itertools.pairwise(rises))
