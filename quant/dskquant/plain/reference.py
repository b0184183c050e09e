"""FP32: what every mode of a plain graph is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dskquant.errors import EngineError, SourceError, TensorError
from dskquant.plain.load import load_plain_graph
from dskquant.plain.measure import answers_to, check_finite, noise_over
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import PlainGraph, Tensors, TensorSpec

ALL_THREADS = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """The graph as it was given, and what it answers to the samples."""

    engine: str
    graph: PlainGraph
    samples: Sequence[Tensors]
    answers: Sequence[dict[str, NDArray[Any]]]

    def load(self, path: Path, engine: str | None = None) -> PlainGraph:
        """The graph of a mode, on the engine of the reference or another one.

        Raises EngineError where it cannot be loaded, or its tensors are not those of the reference.
        """
        graph = load_plain_graph(engine or self.engine, path, ALL_THREADS)
        if (graph.inputs, graph.outputs) != (self.graph.inputs, self.graph.outputs):
            raise EngineError(f"{path.name}: its inputs or outputs are not those of FP32")
        return graph

    def noise_of(self, graph: PlainGraph, name: str) -> GraphNoise:
        """Raises EngineError, naming the mode, where it cannot run, or its answers cannot be compared."""
        try:
            return noise_over(self.answers, answers_to(graph, self.samples))
        except TensorError as error:
            raise EngineError(f"{name}: {error}") from error


def ask_reference(
    engine: str, path: Path, samples_for: Callable[[Sequence[TensorSpec]], Sequence[Tensors]]
) -> Reference:
    """Asks the graph at `path` for its answers to the samples that `samples_for` finds for its inputs.

    Raises SourceError where an answer is not finite, or what `samples_for` raises.
    """
    graph = load_plain_graph(engine, path, ALL_THREADS)
    samples = samples_for(graph.inputs)
    answers = answers_to(graph, samples)
    try:
        check_finite(answers)
    except TensorError as error:
        raise SourceError(f"{path.name}, the graph as it was given: {error}") from error
    return Reference(engine, graph, samples, answers)
