"""Which engine computes a mode of a plain graph, where both may: the fastest of those that are exact enough."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dskd.config import BatchingConfig, EngineUse, ModelConfig
from dskd.engine.step_times import StepKind
from dskd.manager.measuring import InTurn, seconds_of
from dskd.manager.proof import HARMLESS_RATIO, Proof, db_of_ratio
from dskd.manager.timings_file import TimingsFile, fingerprint
from dskd.manager.types import EngineState
from dskd.plain.served_graph import ServedGraph
from dskquant.modes import PrecisionMode
from dskquant.plain.load import PLAIN_ENGINE_NAMES
from dskquant.plain.protocol import Tensors
from dskquant.plain.speed import rounds

ROUNDS = 6
"""Of runs on all engines; the first one, which packs weights, is not counted, and of the others the fastest."""

LEAST_ROUNDS = 2
BUDGET_S = 2.0
"""For each number of rows: no more rounds begin after that."""

MOST_TIMES_THE_NOISE = 2.0
"""Of the power of the noise of the most exact engine. Some graphs one engine computes as nothing but noise."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode on an engine: a graph that has passed its proof, or why there is none."""

    engine: str
    graph: ServedGraph | None = None
    proof: Proof | None = None
    reason: str = ""

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()


class EngineChoice:
    """The engines that may serve one model, and how long they take. Touches the disk."""

    def __init__(self, config: ModelConfig, has_rows: bool, model_state: Path) -> None:
        """`has_rows`: the first dimension of all tensors is that of the batch."""
        is_open = config.engine is EngineUse.AUTO
        self.engines = PLAIN_ENGINE_NAMES if is_open else (config.engine.value,)
        self._has_rows = has_rows
        self._rows = sorted({1, preferred_rows(config.batching) if has_rows else 1})
        self._model_state = model_state
        self._fingerprint = fingerprint(self.engines, config)

    def known(self, mode: PrecisionMode, sha256: str) -> dict[StepKind, float]:
        """Seconds of the runs of a graph as they were measured on this machine; none where any is missing."""
        if len(self.engines) == 1:
            return {}
        found = self._file(mode, sha256).read()
        return found if self._kinds(self.engines, mode) <= found.keys() else {}

    def order(self, mode: PrecisionMode, known: Mapping[StepKind, float]) -> Sequence[str]:
        """The engines, the fastest first where that is known."""
        return sorted(self.engines, key=lambda engine: self.slowness(engine, mode, known)) if known else self.engines

    def measure(
        self, mode: PrecisionMode, sha256: str, found: Collection[Candidate], inputs: Tensors, in_turn: InTurn
    ) -> dict[StepKind, float]:
        """Seconds of the runs of `found`, side by side; `inputs` are real ones, repeated for a batch. Keeps them."""
        graphs = {candidate.engine: candidate.graph for candidate in found if candidate.graph is not None}
        seconds = {
            StepKind(engine, mode, rows): fastest
            for rows in self._rows
            for engine, fastest in _fastest(graphs, self._batch(inputs, rows), in_turn)
        }
        self._file(mode, sha256).write(seconds)
        return seconds

    def states(
        self, found: Collection[Candidate], mode: PrecisionMode, seconds: Mapping[StepKind, float]
    ) -> tuple[EngineState, ...]:
        """For display; nothing where there is no choice."""
        if len(self.engines) == 1:
            return ()
        reasons = {candidate.engine: candidate.reason for candidate in found}
        return tuple(
            EngineState(
                engine,
                {kind.rows: seconds[kind] for kind in sorted(self._kinds([engine], mode)) if kind in seconds},
                reasons.get(engine, ""),
            )
            for engine in self.engines
        )

    def _batch(self, inputs: Tensors, rows: int) -> Tensors:
        """`rows` of `inputs`, from the first one again where there are less."""
        if not self._has_rows:
            return inputs
        return {name: np.resize(tensor, (rows, *tensor.shape[1:])) for name, tensor in inputs.items()}

    def slowness(self, engine: str, mode: PrecisionMode, seconds: Mapping[StepKind, float]) -> float:
        """Grows with the geometric mean over the numbers of rows: a factor gained for one is worth another's."""
        return math.prod(seconds.get(kind, math.inf) for kind in self._kinds([engine], mode))

    def _kinds(self, engines: Collection[str], mode: PrecisionMode) -> set[StepKind]:
        return {StepKind(engine, mode, rows) for engine in engines for rows in self._rows}

    def _file(self, mode: PrecisionMode, sha256: str) -> TimingsFile:
        return TimingsFile(self._model_state / f"timings.{mode.value}.json", f"{sha256} {self._fingerprint}")


def preferred_rows(batching: BatchingConfig | None) -> int:
    """Of the batches that a model is to run under load."""
    return max(batching.preferred_sizes, default=batching.max_size) if batching else 1


def exact_enough(found: Sequence[Candidate]) -> list[Candidate]:
    """Those of `found` whose noise is near that of the most exact one, or harmless; the others with a reason."""
    noises = {each.engine: each.proof.divergence.mean_kl for each in found if each.proof is not None}
    limit = max(HARMLESS_RATIO, MOST_TIMES_THE_NOISE * min(noises.values(), default=0.0))
    return [_judged(each, noises.get(each.engine, 0.0), limit) for each in found]


def _judged(candidate: Candidate, noise: float, limit: float) -> Candidate:
    if noise <= limit:
        return candidate
    candidate.close()
    told = f"its noise is {db_of_ratio(noise):.1f} dB below the signal"
    return Candidate(candidate.engine, reason=f"{told}, where {db_of_ratio(limit):.1f} dB can be had")


def _fastest(graphs: Mapping[str, ServedGraph], inputs: Tensors, in_turn: InTurn) -> list[tuple[str, float]]:
    times: dict[str, list[float]] = {engine: [] for engine in graphs}
    for _ in rounds(ROUNDS, LEAST_ROUNDS, BUDGET_S):
        for engine, graph in graphs.items():
            times[engine].append(in_turn(partial(seconds_of, partial(graph.run, inputs))))
    return [(engine, min(measured[1:])) for engine, measured in times.items()]
