"""Which engine decodes: where a step is faster, but a move must be worth it, and must not be undone at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dskd.engine.engine_choice import DWELL_STEPS, Situation, always_in_slots, by_time
from dskd.engine.step_times import LEARNING_RATE, OUTLIER, StepKind, StepTimes
from dskquant.modes import PrecisionMode

INT4, INT8 = PrecisionMode.INT4, PrecisionMode.INT8
OUTSIDE = Situation(in_slots=False, steps=1000, paged_s=0.060, slots_s=0.033, move_s=0.0)
INSIDE = replace(OUTSIDE, in_slots=True)
seconds = st.floats(1e-4, 10.0)


def test_a_faster_engine_is_taken_and_kept() -> None:
    assert by_time(OUTSIDE)
    assert by_time(INSIDE)
    assert not by_time(replace(OUTSIDE, slots_s=0.090))
    assert not by_time(replace(INSIDE, slots_s=0.090))


@pytest.mark.parametrize("slots_s", [0.055, 0.060, 0.064])
def test_a_gain_that_is_not_clear_moves_nobody(slots_s: float) -> None:
    """Neither way: which of the two is ahead changes from step to step."""
    assert not by_time(replace(OUTSIDE, slots_s=slots_s))
    assert by_time(replace(INSIDE, slots_s=slots_s))


def test_who_has_just_moved_stays_for_a_while() -> None:
    slow = replace(INSIDE, slots_s=0.2)
    assert by_time(replace(slow, steps=DWELL_STEPS - 1))
    assert not by_time(replace(slow, steps=DWELL_STEPS))


def test_a_long_context_is_moved_only_for_a_gain_that_pays_for_it() -> None:
    assert by_time(replace(OUTSIDE, move_s=1.0))  # 27 ms a step: paid within 38 steps
    assert not by_time(replace(OUTSIDE, move_s=2.0))  # 75 steps


@pytest.mark.parametrize("unknown", [{"paged_s": None}, {"slots_s": None}])
def test_without_times_the_engine_that_serves_everything_decodes(unknown: dict[str, None]) -> None:
    assert not by_time(replace(OUTSIDE, **unknown))
    assert not by_time(replace(INSIDE, **unknown))


def test_who_has_decided_is_not_asked() -> None:
    assert always_in_slots(replace(OUTSIDE, slots_s=9.0, steps=0, move_s=9.0))


@given(paged=st.lists(seconds, min_size=1, max_size=300), slots=st.lists(seconds, min_size=1, max_size=300))
def test_however_times_swing_moves_are_rare(paged: list[float], slots: list[float]) -> None:
    in_slots, steps, moves = False, 1000, 0
    for paged_s, slots_s in zip(paged, slots, strict=False):
        chosen = by_time(Situation(in_slots, steps, paged_s, slots_s, 0.0))
        moves += chosen is not in_slots
        steps = 0 if chosen is not in_slots else steps + 1
        in_slots = chosen
    assert moves <= 1 + min(len(paged), len(slots)) / DWELL_STEPS


def kind(rows: int, engine: str = "a", mode: PrecisionMode = INT4) -> StepKind:
    return StepKind(engine, mode, rows)


def test_times_between_two_known_numbers_of_rows_are_in_proportion() -> None:
    times = StepTimes({kind(1): 0.030, kind(4): 0.060, kind(8): 0.100})
    found = [times.estimate(kind(rows)) for rows in (1, 2, 4, 6, 8, 20)]
    assert found == pytest.approx([0.030, 0.040, 0.060, 0.080, 0.100, 0.100])
    assert times.estimate(kind(1, "b")) is None
    assert times.estimate(kind(1, mode=INT8)) is None


def test_a_step_that_was_served_moves_the_average_and_an_outlier_hardly() -> None:
    times = StepTimes({kind(1): 0.030})
    times.learn(kind(1), 0.040)
    assert times.estimate(kind(1)) == pytest.approx(0.030 + LEARNING_RATE * 0.010)
    times = StepTimes({kind(1): 0.030})
    times.learn(kind(1), 30.0)
    assert times.estimate(kind(1)) == pytest.approx(0.030 * (1 + LEARNING_RATE * (OUTLIER - 1)))


def test_a_first_time_is_taken_as_it_is_and_one_of_other_rows_starts_from_its_neighbours() -> None:
    times = StepTimes()
    times.learn(kind(2), 0.050)
    assert times.known == {kind(2): 0.050}
    times.learn(kind(3), 0.060)
    assert times.estimate(kind(3)) == pytest.approx(0.050 + LEARNING_RATE * 0.010)
    assert times.knows("a", INT4)
    assert not times.knows("a", INT8)
