"""Which of two engines decodes the next step. A pure decision: times in, engine out.

Every move costs time, and times are noisy: so a group stays where it is for a while, moves only for a gain that is
clear, and only if the gain of some steps pays for the move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MARGIN = 0.1
"""Share of the step time that a move must save."""

DWELL_STEPS = 32
"""Between two moves by choice of a group."""

PAYBACK_STEPS = 64
"""Within which a move must have paid for itself."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known before a step of sequences that decode together."""

    in_slots: bool  # where they decoded last
    steps: int  # since they moved
    paged_s: float | None  # seconds of the step in the blocks of the pool; None: not known
    slots_s: float | None  # seconds of it in slots
    move_s: float  # seconds it takes to read into slots what these lack; next to nothing is read back


Choice = Callable[[Situation], bool]
"""Whether the step runs in slots."""


def always_in_slots(situation: Situation) -> bool:
    """For those who have decided."""
    return True


def by_time(situation: Situation) -> bool:
    """Where the step is faster, unless moving is not worth it."""
    if situation.paged_s is None or situation.slots_s is None:
        return False  # the engine that serves everything does so until both are known
    if situation.steps < DWELL_STEPS:
        return situation.in_slots
    here_s, there_s = situation.paged_s, situation.slots_s
    if situation.in_slots:
        here_s, there_s = there_s, here_s
    saved_s = here_s - there_s
    is_worth_it = saved_s > MARGIN * here_s and saved_s * PAYBACK_STEPS > situation.move_s
    return situation.in_slots != is_worth_it
