"""What a QuantizerManager answers with. Frozen values for display and for the wire."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dskd.engine.request import InFlight, LoopSnapshot
from dskquant.modes import PrecisionMode


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """How a switch of the precision mode ended, or (`done` False) that it goes on in the background."""

    from_mode: PrecisionMode
    to_mode: PrecisionMode
    generation: int
    resident: bool
    done: bool
    flip_us: float
    prepare_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class ModeState:
    """One mode of a model."""

    mode: PrecisionMode
    resident: bool
    bytes: int
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """State of a manager, for display."""

    engine: str
    mode: PrecisionMode
    generation: int
    hash: str
    modes: tuple[ModeState, ...]
    loop: LoopSnapshot
    kv_cache_bytes: int
    change_in_progress: str


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One change of a model: who, what, when, and how it ended."""

    model: str
    kind: str  # "load", "unload" or "switch"
    actor: str
    outcome: str  # "committed" or "rejected"
    reason: str = ""
    from_mode: PrecisionMode | None = None
    to_mode: PrecisionMode | None = None
    generation: int = 0
    hash: str = ""
    in_flight: InFlight | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    flip_us: float = 0.0
    time: float = field(default_factory=time.time)  # seconds since the epoch
    sequence: int = 0  # set by the history
