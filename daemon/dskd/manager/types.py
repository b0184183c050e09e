"""What a QuantizerManager answers with. Frozen values for display and for the wire."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dskd.config import EngineUse
from dskd.engine.request import InFlight, LoopSnapshot
from dskd.engine.step_times import StepKind
from dskd.monitor.states import NoiseMeasure
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule


@dataclass(frozen=True, slots=True)
class SetReference:
    """A parameter set on this machine."""

    path: Path | None  # its directory or its manifest; None: the default set of the model's store
    sha256: str = ""  # of its manifest; "": whatever is there


@dataclass(frozen=True, slots=True)
class Change:
    """What to change of a model; None keeps what serves."""

    mode: PrecisionMode | None = None
    parameters: SetReference | None = None
    layers: tuple[LayerRule, ...] | None = None
    in_flight: InFlight = InFlight.MIGRATE
    monitor: Mapping[str, Any] | None = None  # [monitor] of a quant config: None keeps it, {} takes it back


@dataclass(frozen=True, slots=True)
class ModeProof:
    """What a mode of a generation answered to the golden prompts; KL(reference || mode) in nats per token."""

    mode: PrecisionMode
    kl_before: float | None  # of the generation that served before; None: not measured
    kl_after: float
    agreement: float  # share of positions with the reference's most probable token
    measure: NoiseMeasure = NoiseMeasure.KL


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """How a change ended, or (`done` False) that it goes on in the background or was only tried."""

    from_generation: int
    to_generation: int
    from_mode: PrecisionMode
    to_mode: PrecisionMode
    hash: str  # of the generation changed to
    parameter_set: str  # hash of its parameter set
    changed: bool  # False: it served already
    done: bool
    proofs: tuple[ModeProof, ...] = ()
    phases_ms: dict[str, float] = field(default_factory=dict)
    flip_us: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationState:
    """A generation that serves or that a rollback can return to."""

    number: int
    hash: str
    parameter_set: str
    committed: float  # seconds since the epoch
    active: bool
    resident: bool
    kl: dict[PrecisionMode, float]  # to the reference on the golden prompts, nats per token


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
class EngineState:
    """An engine that may compute a mode of a plain graph."""

    name: str
    seconds: dict[int, float]  # of a run, by its rows; empty: not measured
    reason: str  # why it cannot; "": it can


@dataclass(frozen=True, slots=True)
class ModeState:
    """One mode of a model."""

    mode: PrecisionMode
    resident: bool
    bytes: int
    tokens: int
    requests: int
    engine: str = ""  # that computes it, where modes of a model have one each
    engines: tuple[EngineState, ...] = ()  # that were to choose from


@dataclass(frozen=True, slots=True)
class SecondGraphState:
    """One mode of a model in memory, on the second engine."""

    mode: PrecisionMode
    bytes: int  # 0: it is not there
    reason: str  # why not


@dataclass(frozen=True, slots=True)
class SecondEngineState:
    """The engine that may decode beside the one that serves everything."""

    name: str
    use: EngineUse
    reason: str  # why it does nothing; "": it may decode
    num_slots: int
    graphs: tuple[SecondGraphState, ...]
    step_seconds: dict[StepKind, float]  # of both engines; what `auto` chooses by


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """State of a manager, for display."""

    engine: str
    mode: PrecisionMode
    generation: int
    hash: str
    parameter_set: str
    generations: tuple[GenerationState, ...]  # newest first
    modes: tuple[ModeState, ...]
    loop: LoopSnapshot
    kv_cache_bytes: int
    change_in_progress: str
    second: SecondEngineState | None = None  # None: none is wanted
    measure: NoiseMeasure = NoiseMeasure.KL


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One change of a model: who, what, when, and how it ended."""

    model: str
    kind: str  # "load", "unload", "switch", "apply", "rollback" or "recover"
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
    from_generation: int = 0
    parameter_set: str = ""
    proofs: tuple[ModeProof, ...] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    sequence: int = 0  # set by the history
