"""A plain graph in memory, as a manager and a batch loop have it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from dskd.manager.types import EngineState
from dskquant.modes import PrecisionMode
from dskquant.plain.protocol import PlainGraph, Tensors


class ServedGraph:
    """One mode of a model."""

    def __init__(self, graph: PlainGraph, mode: PrecisionMode, engine: str, nbytes: int) -> None:
        """`nbytes` is what its weights take, as far as the size of its file tells."""
        self._graph: PlainGraph | None = graph
        self.mode = mode
        self.engine = engine
        self.resident_bytes = nbytes
        self.engines: tuple[EngineState, ...] = ()  # that were to choose from

    def run(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """As `PlainGraph.run`."""
        if self._graph is None:
            raise ValueError(f"the {self.mode.value} graph is closed")
        return self._graph.run(tensors)

    def bind(self, cache: object) -> None:
        """Plain graphs have no cache."""

    def close(self) -> None:
        """Gives its memory back."""
        self._graph = None
