"""Escalated requests take from the others no more time than agreed, and never stand still."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dskd.engine.pace import LONGEST_PAUSE_S, EscalationPace
from dskd.engine.request import GenerationRequest
from dskd.engine.sequence import Chunk, Sequence
from dskquant.modes import PrecisionMode

INT4, FP32 = PrecisionMode.INT4, PrecisionMode.FP32
STEP_S = 0.010


def sequences(count: int, escalated: int) -> list[Sequence]:
    """In mid-answer; the first `escalated` of them are."""
    made = [Sequence(GenerationRequest(str(index), (1,), 100), INT4) for index in range(count)]
    for sequence in made[:escalated]:
        sequence.fallback = sequence.mode = FP32
    return made


class Model:
    """Steps of a fixed duration, and longer by `cost_s` when an escalated request takes part."""

    def __init__(self, running: Many[Sequence], share: float) -> None:
        self.pace, self.running, self.share = EscalationPace(), running, share
        self.others_s = self.extra_s = self.pause_s = self.longest_pause_s = 0.0
        self.runs = 0

    def step(self, cost_s: float, step_s: float = STEP_S) -> None:
        held = self.pace.held(self.running, self.share)
        chunks = [Chunk(sequence, 1) for sequence in self.running if sequence not in held]
        extra_s = cost_s if any(chunk.sequence.is_escalated for chunk in chunks) else 0.0
        self.pace.note(chunks, step_s + extra_s)
        self.others_s += step_s
        self.extra_s += extra_s
        self.runs += extra_s > 0
        self.pause_s = 0.0 if extra_s else self.pause_s + step_s
        self.longest_pause_s = max(self.longest_pause_s, self.pause_s)


def usual(model: Model) -> Model:
    """Steps before anybody is escalated, from which the pace knows how long one takes."""
    escalated = [sequence for sequence in model.running if sequence.is_escalated]
    for sequence in escalated:
        sequence.mode = INT4
    for _ in range(20):
        model.pace.note([Chunk(sequence, 1) for sequence in model.running], STEP_S)
    for sequence in escalated:
        sequence.mode = FP32
    return model


@pytest.mark.parametrize(("escalated", "cost_s"), [(1, 0.007), (1, 0.0015), (3, 0.012)])
def test_the_others_lose_the_agreed_share_for_each_escalated_request(escalated: int, cost_s: float) -> None:
    model = usual(Model(sequences(8, escalated), share=0.05))
    for _ in range(2000):
        model.step(cost_s)
    assert model.extra_s / model.others_s == pytest.approx(0.05 * escalated, rel=0.15)


def test_what_costs_less_than_the_share_is_never_held() -> None:
    model = usual(Model(sequences(8, 1), share=0.05))
    for _ in range(100):
        model.step(0.05 * STEP_S / 2)
    assert model.runs == 100


def test_one_whose_run_is_too_dear_makes_a_token_a_second() -> None:
    model = usual(Model(sequences(8, 1), share=0.01))
    for _ in range(1000):
        model.step(cost_s=5.0)
    assert model.longest_pause_s == pytest.approx(LONGEST_PAUSE_S, abs=STEP_S)


@pytest.mark.parametrize(("count", "escalated", "share"), [(3, 3, 0.05), (1, 1, 0.05), (8, 2, 1.0), (4, 0, 0.05)])
def test_nobody_is_held_where_nobody_else_runs_or_no_pace_is_kept(count: int, escalated: int, share: float) -> None:
    model = usual(Model(sequences(count, escalated), share))
    for _ in range(50):
        assert not model.pace.held(model.running, share)
        model.step(0.02)


def test_prompts_of_others_are_not_taken_for_a_cost_of_the_escalated() -> None:
    running = sequences(8, 1)
    model = usual(Model(running, share=0.05))
    reading = Sequence(GenerationRequest("long", tuple(range(200)), 9), INT4)
    model.pace.note([*(Chunk(sequence, 1) for sequence in running), Chunk(reading, 200)], 0.5)
    assert not model.pace.held(running, 0.05)


def test_a_request_is_not_escalated_any_more_when_its_model_serves_in_that_mode() -> None:
    (sequence,) = sequences(1, 1)
    assert sequence.is_escalated
    sequence.base_mode = FP32
    assert not sequence.is_escalated


@given(
    share=st.floats(0.001, 1),
    escalated=st.integers(1, 7),
    steps=st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0.0001, 3)), min_size=1, max_size=200),
)
def test_whatever_steps_take_no_pause_is_longer_than_agreed(
    share: float, escalated: int, steps: list[tuple[float, float]]
) -> None:
    model = usual(Model(sequences(8, escalated), share))
    for step_s, cost_s in steps:
        model.step(cost_s, step_s)
    assert model.longest_pause_s < LONGEST_PAUSE_S + 0.5
