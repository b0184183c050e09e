"""Builds a graph beside the ones that serve: memory checked, compiled, warmed up, proven, bound to the cache."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dskd import memory
from dskd.manager.proof import Proof, Prover
from dskquant.engines.protocol import CompileOptions, Engine, Graph, KVCache
from dskquant.modes import PrecisionMode

NICENESS = 10
"""Of the thread that builds: requests being served go first."""


@dataclass(frozen=True, slots=True)
class Build:
    """A graph that may serve, and what it took."""

    graph: Graph
    proofs: list[Proof]
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds the graphs of one model."""

    engine: Engine
    store: Path
    options: CompileOptions
    prover: Prover

    def build(self, modes: frozenset[PrecisionMode], cache: KVCache | None) -> Build:
        """Blocks for as long as it takes. Without `cache` the caller binds the graph before it serves.

        Raises ResourceExhaustedError when memory is short, FailedPreconditionError when the proof fails, StoreError
        when files are damaged. Nothing of the graph is left then.
        """
        phases: dict[str, float] = {}
        lower_priority()
        with _timed(phases, "validate"):
            names = "+".join(sorted(mode.value for mode in modes))
            memory.require(self.engine.estimate_bytes(self.store, modes, self.options), f"loading {names}")
        with _timed(phases, "build"):
            graph = self.engine.compile(self.store, modes, self.options)
        try:
            with _timed(phases, "prove"):
                proofs = self.prover.prove(graph)
                graph.release_source()
                if cache is not None:
                    graph.bind(cache)
        except BaseException:
            graph.close()
            raise
        return Build(graph, proofs, phases)


def lower_priority() -> None:
    """Makes the calling thread yield to those that serve. Linux has a niceness for each thread: setpriority(2)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    phases[name] = (time.perf_counter() - began) * 1e3
