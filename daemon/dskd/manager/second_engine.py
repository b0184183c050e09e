"""The engine that decodes few streams faster, beside the one that serves everything: its graphs and its step times.

It is an addition: whatever it cannot do (a mode it lacks, memory that is short, a proof that fails) leaves the other
engine serving alone, and the reason is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from dskd import huge_pages, memory
from dskd.config import EngineUse, ModelConfig
from dskd.engine.engine_choice import always_in_slots, by_time
from dskd.engine.slot_decoder import SecondEngine
from dskd.engine.step_times import StepTimes
from dskd.errors import EXPECTED_ERRORS
from dskd.manager.generation import Generation
from dskd.manager.measuring import InTurn, measure_paged, measure_slots
from dskd.manager.proof import Answers, Proof, Prover
from dskd.manager.timings_file import TimingsFile, timings_file
from dskquant.engines.protocol import CompileOptions, Engine, Graph, SlotCache, SlotEngine, SlotGraph
from dskquant.modes import PrecisionMode

SLOTS = 8
"""Streams that may decode in slots at once; with more, the paged engine is faster wherever it was measured."""

EngineThread = Callable[[Callable[[], Answers]], Answers]
"""Has a graph asked where that disturbs nobody."""

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


@dataclass(frozen=True, slots=True)
class SlotBuild:
    """A graph of the second engine, or why there is none."""

    graph: SlotGraph | None = None
    proofs: tuple[Proof, ...] = ()
    reason: str = ""

    @property
    def nbytes(self) -> int:
        return self.graph.resident_bytes if self.graph else 0

    def close(self) -> None:
        if self.graph:
            self.graph.close()


@dataclass(frozen=True, slots=True)
class SecondBuilder:
    """Builds the graphs of the second engine of one model, in the thread that builds those of the first one."""

    use: EngineUse
    engine: SlotEngine
    paged_engine: Engine
    store: Path
    options: CompileOptions
    prover: Prover
    cache: SlotCache
    times: StepTimes
    file: TimingsFile

    @property
    def decoding(self) -> SecondEngine:
        """What the step loop needs of it."""
        chooses = self.use is EngineUse.AUTO
        choice = by_time if chooses else always_in_slots
        return SecondEngine(self.engine.name, self.cache, choice, self.times, explores=chooses)

    def build(
        self,
        generation: Generation,
        modes: frozenset[PrecisionMode],
        engine_thread: EngineThread,
        in_turn: InTurn,
        check: Callable[[], None],
    ) -> SlotBuild:
        """A graph of `modes` that has been proven, bound to the slots; or why there is none.

        It is compiled in the calling thread, as that is mostly work in Python: an idle thread would keep the
        interpreter's lock for long. It is proven in `engine_thread`, and timed `in_turn`. `check` raises a DskdError
        when it is wanted no longer.
        """
        if not modes <= self.engine.modes:
            return SlotBuild(reason=f"{self.engine.name} does not have it")
        try:
            needed = self.engine.estimate_bytes(self.store, modes, self.options)
            memory.require(needed, f"a second copy of the weights for {self.engine.name}")
            graph = self.engine.compile(self.store, modes, self.options, generation.effective_parameters)
        except EXPECTED_ERRORS as error:
            return self._refused(modes, error)
        try:
            proofs = self._prove(graph, engine_thread, check)
            huge_pages.collapse()
            if self.use is EngineUse.AUTO:
                self._measure_slots(graph, in_turn)
            graph.bind(self.cache)
        except BaseException as error:
            graph.close()
            if isinstance(error, EXPECTED_ERRORS):
                return self._refused(modes, error)
            raise
        return SlotBuild(graph, proofs)

    def save_times(self) -> None:
        """Keeps what is known of step times over a restart."""
        self.file.write(self.times.known)

    def measure_paged(self, graph: Graph, in_turn: InTurn) -> None:
        """Finds out how long steps of `graph` take, if somebody chooses by that. May leave a scratch cache bound."""
        if self.use is EngineUse.AUTO:
            for mode in graph.modes & self.engine.modes:
                if not self.times.knows(self.paged_engine.name, mode):
                    measure_paged(graph, self.paged_engine, mode, in_turn, self.times)

    def _prove(self, graph: SlotGraph, engine_thread: EngineThread, check: Callable[[], None]) -> tuple[Proof, ...]:
        check()
        answers = engine_thread(lambda: self.prover.ask_in_slots(graph))
        check()
        proofs = self.prover.judge(answers, may_stand_in=False)
        for proof in proofs:
            log.info("proven", engine=self.engine.name, mode=proof.mode.value, mean_kl=proof.divergence.mean_kl)
        return tuple(proofs)

    def _measure_slots(self, graph: SlotGraph, in_turn: InTurn) -> None:
        for mode in graph.modes:
            if not self.times.knows(self.engine.name, mode):
                measure_slots(graph, self.engine.name, mode, in_turn, self.times)
        self.save_times()

    def _refused(self, modes: frozenset[PrecisionMode], error: Exception) -> SlotBuild:
        names = sorted(mode.value for mode in modes)
        log.warning("the second engine does without", engine=self.engine.name, modes=names, reason=str(error))
        return SlotBuild(reason=str(error))


def prepare(
    config: ModelConfig,
    engine: SlotEngine,
    paged_engine: Engine,
    prover: Prover,
    model_state: Path,
) -> SecondBuilder:
    """Raises ResourceExhaustedError when memory is too short for the slots, EngineError when `slot_bytes` are."""
    memory.require(config.slot_bytes, f"the KV slots of {engine.name}")
    cache = engine.allocate_cache(config.path, SLOTS, config.slot_bytes)
    file = timings_file(model_state, config, (paged_engine.name, engine.name))
    times = StepTimes(file.read())
    return SecondBuilder(config.engine, engine, paged_engine, config.path, config.options, prover, cache, times, file)
