"""Builds a graph beside the ones that serve: memory checked, compiled, warmed up, proven, bound to the cache."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dskd import huge_pages, memory
from dskd.manager.generation import Generation
from dskd.manager.measuring import InTurn
from dskd.manager.parts import Build, Overtaking
from dskd.manager.proof import Prover
from dskd.manager.second_engine import SecondBuilder, SlotBuild
from dskd.priority import PATIENCE_S, at_once, lower_priority, when_idle
from dskquant.engines.protocol import CompileOptions, Engine, KVCache
from dskquant.modes import QUANTIZED, PrecisionMode

AWAITED_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds the graphs of one model."""

    engine: Engine
    store: Path
    options: CompileOptions
    prover: Prover
    second: SecondBuilder | None = None

    def graph_key(self, mode: PrecisionMode) -> frozenset[PrecisionMode]:
        """The modes served by the graph that serves `mode`."""
        return self.options.graph_key(mode)

    def weights_of(self, generation: Generation, modes: frozenset[PrecisionMode]) -> str:
        """Hash of the generation; "" for float modes, which run the source weights in all generations."""
        return generation.hash if modes <= QUANTIZED else ""

    def require_memory(self, graphs: Collection[frozenset[PrecisionMode]], given_back: int = 0) -> None:
        """Raises ResourceExhaustedError, with the numbers, unless the graphs of these modes fit into memory.

        `given_back` bytes will be free by then that are not yet.
        """
        needed = sum(self.engine.estimate_bytes(self.store, modes, self.options) for modes in graphs)
        names = ", ".join("+".join(sorted(mode.value for mode in modes)) for modes in graphs)
        memory.require(max(needed - given_back, 0), f"loading {names}")

    def build(
        self,
        generation: Generation,
        modes: frozenset[PrecisionMode],
        cache: KVCache | None,
        overtaking: Overtaking,
        in_turn: InTurn,
    ) -> Build:
        """Blocks for as long as it takes; the engine works when the cores are idle. Steps are timed `in_turn`.

        Without `cache` nothing serves yet: the build has the usual priority, which the threads keep that the engine
        starts and will serve with, and the caller binds the graph.

        Raises ResourceExhaustedError when memory is short, FailedPreconditionError when the proof fails or it is
        overtaken, StoreError when files are damaged. Nothing of the graph is left then.
        """
        phases: dict[str, float] = {}
        if cache is not None:
            lower_priority()
        overtaking.check()
        with timed(phases, "validate"):
            self.require_memory([modes])
        engine_thread = at_once if cache is None else partial(when_idle, patience_s=_patience_s(modes))
        with timed(phases, "build"):
            parameters = generation.effective_parameters
            graph = engine_thread(lambda: self.engine.compile(self.store, modes, self.options, parameters))
        try:
            overtaking.check()
            with timed(phases, "prove"):
                proofs = self.prover.judge(engine_thread(lambda: self.prover.ask(graph)))
                graph.release_source()
                huge_pages.collapse()
                if self.second is not None:
                    self.second.measure_paged(graph, in_turn)
            overtaking.check()
            if cache is not None:
                graph.bind(cache)
        except BaseException:
            graph.close()
            raise
        build_slots = partial(self._build_slots, self.second, generation, modes) if self.second else None
        return Build(graph, proofs, phases, build_slots)

    def _build_slots(
        self,
        second: SecondBuilder,
        generation: Generation,
        modes: frozenset[PrecisionMode],
        is_serving: bool,
        overtaking: Overtaking,
        in_turn: InTurn,
    ) -> SlotBuild:
        if is_serving:
            lower_priority()
        engine_thread = when_idle if is_serving else at_once
        return second.build(generation, modes, engine_thread, in_turn, overtaking.check)


def _patience_s(modes: frozenset[PrecisionMode]) -> float:
    """How long a build waits for idle cores. No change of parameters builds a float mode: somebody wants it served."""
    return PATIENCE_S if modes <= QUANTIZED else AWAITED_PATIENCE_S


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Notes the milliseconds that the block takes."""
    began = time.perf_counter()
    yield
    phases[name] = (time.perf_counter() - began) * 1e3
