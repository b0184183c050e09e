"""What the noise monitor of a model knows, and what it may do: frozen values for display, a protocol for effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dskd.engine.request import LoopSnapshot, ModeRules, ScoringPlan
from dskd.manager.types import HistoryEntry
from dskd.monitor.states import FallbackState, NoiseMeasure
from dskd.monitor.window import NoiseStatistics
from dskquant.modes import PrecisionMode


@dataclass(frozen=True, slots=True)
class NoisePoint:
    """One scored token."""

    time: float  # seconds since the epoch
    kl: float  # KL(reference || mode), nats
    agrees: bool
    generation: int


@dataclass(frozen=True, slots=True)
class ModeNoise:
    """The noise of one mode of a model."""

    mode: PrecisionMode
    state: FallbackState
    cause: str  # of the last trip; "" if there was none
    trips: int
    threshold: float | None  # mean KL above which it falls back; None: not known
    statistics: NoiseStatistics  # of the window
    total_samples: int
    non_finite: int
    evidence: float
    evidence_needed: float
    entropy: float  # means over recent tokens this mode made; NaN while there are none
    margin: float
    unique_ngrams: float
    latest: tuple[NoisePoint, ...]


@dataclass(frozen=True, slots=True)
class NoiseSnapshot:
    """All that the monitor of a model knows."""

    generation: int
    reference: PrecisionMode | None
    modes: tuple[ModeNoise, ...]  # those that were scored or have a threshold, the least exact first
    fallback: PrecisionMode | None  # serves in place of a tripped mode
    lowered: bool  # by the load rule
    pin: PrecisionMode | None
    escalated_requests: int
    measure: NoiseMeasure = NoiseMeasure.KL


@dataclass(frozen=True, slots=True)
class Served:
    """What a model serves with, as its monitor must know it."""

    generation: int
    mode: PrecisionMode
    pinned: bool
    expected_kl: Mapping[PrecisionMode, float]  # of the parameter set; what the proof measured where it tells nothing
    resident: frozenset[PrecisionMode]
    loop: LoopSnapshot


class MonitoredModel(Protocol):
    """The model of a monitor. All methods belong to the asyncio thread; they raise DskdError or QuantError."""

    def served(self) -> Served: ...

    async def make_ready(self, mode: PrecisionMode) -> None:
        """Builds `mode` if it is not in memory, and keeps it there until `let_go`."""
        ...

    def let_go(self, mode: PrecisionMode) -> None:
        """Ends `make_ready`; also of one that has failed or is still under way."""
        ...

    async def set_rules(self, rules: ModeRules, repair: bool) -> None:
        """From the next step on; `repair`: sequences whose mode rises by it read their tokens again in the new mode."""
        ...

    async def set_scoring(self, plan: ScoringPlan | None) -> None: ...

    async def escalate(self, request_id: str, mode: PrecisionMode, repair: bool) -> bool:
        """Serves one open request in at least `mode` to its end; False if it is not open any more."""
        ...

    def note(self, entry: HistoryEntry) -> None:
        """Keeps `entry` in the history and tells it to listeners and the log."""
        ...
