"""What a model may start with: what was committed last, else what was committed before, else its own default set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dskd.manager.state_file import Committed, KeptGeneration, committed_mode
from dskquant.modes import PrecisionMode


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """A generation to start with, and what is remembered beside it."""

    generation: KeptGeneration | None  # None: the default set of the model's store
    mode: PrecisionMode
    kept: tuple[KeptGeneration, ...] = ()
    last_number: int = 0  # of all generations there ever were
    pinned: bool = False
    monitor: str = ""  # see `Committed`


def starting_points(states: Sequence[Committed], default_mode: PrecisionMode) -> list[StartingPoint]:
    """The starting points that `states` (the last committed first) leave, the best first."""
    points: dict[str, StartingPoint] = {}
    for state in states:
        mode = committed_mode(state, default_mode)
        for kept in sorted(state.kept, key=lambda kept: kept.number != state.generation):
            is_pinned = state.pinned and mode is state.mode
            point = StartingPoint(kept, mode, state.kept, state.last_number, is_pinned, state.monitor)
            points.setdefault(kept.hash, point)
    last_number = max((state.last_number for state in states), default=0)
    monitor = states[0].monitor if states else ""
    return [*points.values(), StartingPoint(None, default_mode, last_number=last_number, monitor=monitor)]
