"""Builds a plain graph beside the ones that serve: memory checked, loaded, asked the golden inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from dskd import memory
from dskd.config import ProofConfig
from dskd.errors import FailedPreconditionError
from dskd.manager.build import timed
from dskd.manager.measuring import InTurn
from dskd.manager.parts import Build, Overtaking
from dskd.manager.proof import Proof, db_of_ratio, ratio_of_db
from dskd.plain.generation import PlainGeneration, PlainSet, modes_of
from dskd.plain.served_graph import ServedGraph
from dskd.priority import lower_priority
from dskquant.divergence import Divergence
from dskquant.errors import EngineError, TensorError
from dskquant.modes import PrecisionMode
from dskquant.plain.load import load_plain_graph
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import Tensors
from dskquant.plain.store import PlainGolden, StoredGraph, read_golden

MEMORY_FACTOR = 2
"""An engine reads the file and packs the weights."""


HARMLESS_RATIO = 1e-4
"""Noise 40 dB below the signal is never much: modes that are nearly exact may differ by any factor."""


class PlainProver:
    """Compares what a graph answers to the golden inputs with what FP32 answered when the store was made."""

    def __init__(self, limits: ProofConfig) -> None:
        self._limits = limits

    def judge(self, mode: PrecisionMode, golden: PlainGolden, answers: Tensors) -> Proof:
        """Raises FailedPreconditionError, naming the mode and the figures, when it is not finite or too far away."""
        try:
            noise = GraphNoise.between(golden.outputs, answers)
        except (TensorError, ValueError) as error:
            raise _failed(mode, str(error)) from error
        agreement = 1.0 if noise.top1 is None else noise.top1
        if noise.sqnr_db < self._limits.min_sqnr_db or agreement < self._limits.min_agreement:
            raise _failed(
                mode,
                f"on the golden inputs its noise is {noise.sqnr_db:.1f} dB below the signal (at least "
                f"{self._limits.min_sqnr_db:g} dB) and its top-1 agreement {agreement:.0%} "
                f"(at least {self._limits.min_agreement:.0%})",
            )
        ratio = ratio_of_db(noise.sqnr_db)
        return Proof(mode, Divergence(_rows(golden), ratio, ratio, agreement, finite=True))

    def judge_change(self, before: Mapping[PrecisionMode, float], after: Collection[Proof]) -> None:
        """Raises FailedPreconditionError when a mode of a new generation is much noisier than it was before."""
        worst = self._limits.max_worsening
        for proof in after:
            known, found = before.get(proof.mode), proof.divergence.mean_kl
            if known is not None and found > max(known * worst, HARMLESS_RATIO):
                raise _failed(
                    proof.mode,
                    f"on the golden inputs its noise is {db_of_ratio(found):.1f} dB below the signal, that of the "
                    f"serving generation {db_of_ratio(known):.1f} dB (limit: {worst:g} times the power)",
                )


class PlainBuilder:
    """Builds the graphs of one model."""

    def __init__(self, engine: str, threads: int, default: PlainSet, prover: PlainProver) -> None:
        self.engine = engine
        self.prover = prover
        self._threads = threads
        self._default = default
        # A thread inherits its niceness: what an engine starts in this one serves at the usual priority.
        self._starter = ThreadPoolExecutor(1, "load-plain")
        self._starter.submit(lambda: None).result()

    def close(self) -> None:
        self._starter.shutdown()

    def graph_key(self, mode: PrecisionMode) -> frozenset[PrecisionMode]:
        """The modes served by the graph that serves `mode`: it alone."""
        return frozenset({mode})

    def weights_of(self, generation: PlainGeneration, modes: frozenset[PrecisionMode]) -> str:
        """Digest of the file. A mode that the store lacks has none, and cannot be built."""
        graphs = generation.parameters.manifest.graphs
        return ",".join(graphs[mode].sha256 for mode in modes if mode in graphs)

    def require_memory(self, graphs: Collection[frozenset[PrecisionMode]], given_back: int = 0) -> None:
        """Raises ResourceExhaustedError unless the graphs of these modes fit into memory, FailedPreconditionError for a
        mode that the store does not have.
        """
        wanted = [mode for modes in graphs for mode in modes]
        needed = sum(MEMORY_FACTOR * stored_graph(self._default, mode).nbytes for mode in wanted)
        memory.require(max(needed - given_back, 0), f"loading {', '.join(mode.value for mode in wanted)}")

    def build(
        self,
        generation: PlainGeneration,
        modes: frozenset[PrecisionMode],
        cache: object,
        overtaking: Overtaking,
        in_turn: InTurn,
    ) -> Build:
        """Blocks for as long as it takes; without `cache` nothing serves yet.

        Raises ResourceExhaustedError when memory is short, FailedPreconditionError when the store lacks the mode, the
        proof fails or it is overtaken, StoreError when files are damaged, EngineError when the engine refuses them.
        """
        (mode,) = modes
        phases: dict[str, float] = {}
        if cache is not None:
            lower_priority()
        overtaking.check()
        with timed(phases, "validate"):
            stored = stored_graph(generation.parameters, mode)
            memory.require(MEMORY_FACTOR * stored.nbytes, f"loading {mode.value}")
            stored.verify(generation.parameters.directory)
            golden = read_golden(generation.parameters.directory)
        with timed(phases, "build"):
            graph = self._load(generation.parameters, mode, stored)
        overtaking.check()
        with timed(phases, "prove"):
            proof = self.prover.judge(mode, golden, self._ask(graph, golden))
        overtaking.check()
        return Build(graph, [proof], phases)

    def _load(self, parameters: PlainSet, mode: PrecisionMode, stored: StoredGraph) -> ServedGraph:
        path = parameters.directory / stored.file
        graph = self._starter.submit(load_plain_graph, self.engine, path, self._threads).result()
        manifest = parameters.manifest
        if {*graph.inputs} != {*manifest.inputs} or {*graph.outputs} != {*manifest.outputs}:
            raise FailedPreconditionError(mode.value, f"{path}: has other inputs or outputs than its manifest says")
        return ServedGraph(graph, mode, self.engine, stored.nbytes)

    def _ask(self, graph: ServedGraph, golden: PlainGolden) -> Tensors:
        try:
            return graph.run(golden.inputs)
        except EngineError as error:
            raise _failed(graph.mode, str(error)) from error


def stored_graph(parameters: PlainSet, mode: PrecisionMode) -> StoredGraph:
    """Raises FailedPreconditionError when the store does not have `mode`."""
    graphs = parameters.manifest.graphs
    if mode not in graphs:
        known = modes_of(parameters.manifest)
        raise FailedPreconditionError(mode.value, f"{parameters.directory} has no {mode.value} graph; it has: {known}")
    return graphs[mode]


def _rows(golden: PlainGolden) -> int:
    return max((math.prod(tensor.shape[:1]) for tensor in golden.outputs.values()), default=0)


def _failed(mode: PrecisionMode, problem: str) -> FailedPreconditionError:
    return FailedPreconditionError(mode.value, f"{mode.value} failed its proof: {problem}")
