"""Builds a plain graph beside the ones that serve: memory checked, loaded, asked the golden inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from dskd import memory
from dskd.config import ProofConfig
from dskd.engine.step_times import StepKind
from dskd.errors import EXPECTED_ERRORS, FailedPreconditionError
from dskd.manager.build import timed
from dskd.manager.measuring import InTurn
from dskd.manager.parts import Build, Overtaking
from dskd.manager.proof import HARMLESS_RATIO, Proof, db_of_ratio, ratio_of_db
from dskd.manager.types import EngineState
from dskd.plain.engines import Candidate, EngineChoice, exact_enough
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

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


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

    def __init__(self, choice: EngineChoice, threads: int, default: PlainSet, prover: PlainProver) -> None:
        self.prover = prover
        self._choice = choice
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
        proof fails or it is overtaken, StoreError when files are damaged, EngineError when the engine refuses them;
        where there is a choice of engines, only if none of them can.
        """
        (mode,) = modes
        phases: dict[str, float] = {}
        if cache is not None:
            lower_priority()
        overtaking.check()
        with timed(phases, "validate"):
            stored = stored_graph(generation.parameters, mode)
            stored.verify(generation.parameters.directory)
            task = _Task(generation.parameters, mode, stored, read_golden(generation.parameters.directory), overtaking)
        known = self._choice.known(mode, stored.sha256)
        found = self._candidates(task, self._choice.order(mode, known), phases, is_enough=bool(known))
        able = [each for each in found if each.graph is not None]
        if len(able) > 1:
            with timed(phases, "measure"):
                known = self._measure(task, able, in_turn)
        best, *others = sorted(able, key=lambda each: self._choice.slowness(each.engine, mode, known))
        for other in others:
            other.close()
        return self._build_of(best, self._choice.states(found, mode, known), phases)

    def _build_of(self, best: Candidate, states: tuple[EngineState, ...], phases: dict[str, float]) -> Build:
        if best.graph is None or best.proof is None:
            raise TypeError("nothing was built")
        best.graph.engines = states
        return Build(best.graph, [best.proof], phases)

    def _candidates(
        self, task: _Task, engines: Sequence[str], phases: dict[str, float], is_enough: bool
    ) -> list[Candidate]:
        """What became of the mode on `engines`, at least one of which can; with `is_enough`, on the first that can."""
        found: list[Candidate] = []
        errors: list[Exception] = []
        try:
            for engine in engines:
                try:
                    found.append(self._candidate(task, engine, phases))
                except EXPECTED_ERRORS as error:
                    task.overtaking.check()
                    log.warning("an engine cannot serve", engine=engine, mode=task.mode.value, reason=str(error))
                    found.append(Candidate(engine, reason=str(error)))
                    errors.append(error)
                if is_enough and found[-1].graph is not None:
                    break
        except BaseException:
            for each in found:
                each.close()
            raise
        if len(errors) == len(engines):
            raise errors[0]
        return exact_enough(found)

    def _candidate(self, task: _Task, engine: str, phases: dict[str, float]) -> Candidate:
        task.overtaking.check()
        memory.require(MEMORY_FACTOR * task.stored.nbytes, f"loading {task.mode.value}")
        with timed(phases, "build"):
            graph = self._load(task, engine)
        task.overtaking.check()
        with timed(phases, "prove"):
            proof = self.prover.judge(task.mode, task.golden, self._ask(graph, task.golden))
        task.overtaking.check()
        return Candidate(engine, graph, proof)

    def _measure(self, task: _Task, able: Sequence[Candidate], in_turn: InTurn) -> dict[StepKind, float]:
        try:
            return self._choice.measure(task.mode, task.stored.sha256, able, task.golden.inputs, in_turn)
        except BaseException:
            for each in able:
                each.close()
            raise

    def _load(self, task: _Task, engine: str) -> ServedGraph:
        path = task.parameters.directory / task.stored.file
        graph = self._starter.submit(load_plain_graph, engine, path, self._threads).result()
        manifest = task.parameters.manifest
        if {*graph.inputs} != {*manifest.inputs} or {*graph.outputs} != {*manifest.outputs}:
            raise FailedPreconditionError(
                task.mode.value, f"{path}: has other inputs or outputs than its manifest says"
            )
        return ServedGraph(graph, task.mode, engine, task.stored.nbytes)

    def _ask(self, graph: ServedGraph, golden: PlainGolden) -> Tensors:
        try:
            return graph.run(golden.inputs)
        except EngineError as error:
            raise _failed(graph.mode, str(error)) from error


@dataclass(frozen=True, slots=True)
class _Task:
    """A mode to build."""

    parameters: PlainSet
    mode: PrecisionMode
    stored: StoredGraph
    golden: PlainGolden
    overtaking: Overtaking


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
