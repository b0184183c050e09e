"""What a manager is put together from. Language models and plain graphs bring parts of their own.

The graphs of a model fit its loop and its cache, and its parameter sets its catalogue: they belong to the same kind of
model, and pass through the hands of a manager, which knows no kind. Hence `Any` where they do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dskd.engine.request import FlipReport, InFlight, LoopSnapshot, ModeRules, ScoringPlan
from dskd.errors import FailedPreconditionError
from dskd.manager.measuring import InTurn
from dskd.manager.proof import Proof
from dskd.manager.second_engine import SlotBuild
from dskd.manager.state_file import KeptGeneration
from dskd.manager.types import SetReference
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule

T = TypeVar("T")


class ServedSet(Protocol):
    """A parameter set: what the quantized modes of a generation are made with."""

    @property
    def hash(self) -> str:
        """Hex SHA-256 of its manifest."""
        ...

    @property
    def expected_kl(self) -> Mapping[PrecisionMode, float]:
        """The noise it was measured to have; see `dskd.monitor.states.NoiseMeasure`."""
        ...


class ServedGeneration(Protocol):
    """What exactly serves."""

    @property
    def number(self) -> int: ...
    @property
    def hash(self) -> str: ...
    @property
    def parameters(self) -> ServedSet: ...
    @property
    def layers(self) -> tuple[LayerRule, ...]: ...


class ResidentGraph(Protocol):
    """A graph in memory."""

    @property
    def resident_bytes(self) -> int: ...
    def bind(self, cache: Any) -> None:
        """Makes `cache`, where its kind of model has one, the one that it reads and writes."""
        ...

    def close(self) -> None: ...


BuildSlots = Callable[[bool, "Overtaking", InTurn], SlotBuild]
"""Makes a graph of the second engine, or tells why there is none; the first argument tells whether something serves.

Blocks for as long as it takes, and ends early when it is overtaken.
"""


@dataclass(frozen=True, slots=True)
class Build:
    """A graph that may serve, and what it took."""

    graph: ResidentGraph
    proofs: list[Proof]
    phases_ms: dict[str, float] = field(default_factory=dict)
    build_slots: BuildSlots | None = None  # makes the same on the second engine; None: there is none


class Overtaking:
    """Tells a build that nobody wants it any more. The engines cannot be interrupted: it is asked between two phases.

    May be used from any thread.
    """

    def __init__(self) -> None:
        self._by: str | None = None

    def overtake(self, by: str) -> None:
        """`by` is what has come instead, such as "a later change"."""
        self._by = by

    def happened(self) -> bool:
        return self._by is not None

    def check(self) -> None:
        """Raises FailedPreconditionError if it was overtaken."""
        if self._by is not None:
            raise FailedPreconditionError("change", f"overtaken by {self._by}")


class ModelProver(Protocol):
    """The proof gate."""

    def judge_change(self, before: Mapping[PrecisionMode, float], after: Collection[Proof]) -> None:
        """Raises FailedPreconditionError when a mode of a new generation is much noisier than it was before."""
        ...


class ModelBuilder(Protocol):
    """Builds the graphs of one model."""

    @property
    def prover(self) -> ModelProver: ...

    def graph_key(self, mode: PrecisionMode) -> frozenset[PrecisionMode]:
        """The modes served by the graph that serves `mode`."""
        ...

    def weights_of(self, generation: Any, modes: frozenset[PrecisionMode]) -> str:
        """What the graph of `modes` computes with: generations that agree on it share the graph."""
        ...

    def require_memory(self, graphs: Collection[frozenset[PrecisionMode]], given_back: int = 0) -> None:
        """Raises ResourceExhaustedError, with the numbers, unless the graphs of these modes fit into memory."""
        ...

    def build(
        self,
        generation: Any,
        modes: frozenset[PrecisionMode],
        cache: Any,
        overtaking: Overtaking,
        in_turn: InTurn,
    ) -> Build:
        """Blocks for as long as it takes; without `cache` nothing serves yet. Raises DskdError or QuantError."""
        ...


class ModelCatalogue(Protocol):
    """Makes generations. Everything here reads files, and belongs into worker threads."""

    @property
    def default(self) -> Any:
        """The set that the model was converted with. Raises StoreError when it is damaged."""
        ...

    def generation(self, number: int, parameters: Any, layers: tuple[LayerRule, ...]) -> ServedGeneration:
        """Raises FailedPreconditionError for a rule that fits no layer."""
        ...

    def find(self, reference: SetReference, before_piece: Callable[[], None]) -> ServedSet:
        """The set that `reference` names, checked, where it lies. Raises StoreError, FailedPreconditionError."""
        ...

    def keep(self, found: Any, is_cancelled: Callable[[], bool]) -> ServedSet:
        """A copy of the daemon's own. Raises DskdError or StoreError."""
        ...

    def reopen(self, kept: KeptGeneration) -> ServedGeneration:
        """A generation of before. Raises StoreError when its set is gone or damaged, and as `generation` does."""
        ...

    def forget_all_but(self, kept: Iterable[KeptGeneration], others: frozenset[str]) -> None:
        """Removes the sets that no generation of `kept` needs and that are not among `others`."""
        ...


class ModelLoop(Protocol):
    """The thread that serves the requests of a model, one step or batch after the other: see `StepLoop`."""

    def stop(self) -> None: ...
    def drain(self, grace_s: float) -> Future[int]: ...
    def install(self, generation: int, graph: Any, slot_graph: Any = None) -> Future[None]: ...
    def install_slots(self, generation: int, slot_graph: Any) -> Future[None]: ...
    def flip(self, mode: PrecisionMode, generation: int, in_flight: InFlight) -> Future[FlipReport]: ...
    def retire(self, generation: int, modes: frozenset[PrecisionMode]) -> Future[bool]: ...
    def suspend(self, generation: int, modes: frozenset[PrecisionMode]) -> Future[None]: ...
    def resume(self) -> Future[None]: ...
    def set_rules(self, rules: ModeRules, repair: bool) -> Future[None]: ...
    def escalate(self, request_id: str, mode: PrecisionMode, repair: bool) -> Future[bool]: ...
    def set_scoring(self, plan: ScoringPlan | None) -> Future[None]: ...
    def between_steps(self, work: Callable[[], T]) -> Future[T]: ...
    def set_preparing(self, is_preparing: bool) -> Future[None]: ...
    def snapshot(self) -> LoopSnapshot: ...
