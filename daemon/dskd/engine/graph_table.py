"""The graphs a step loop can run, by generation and mode."""

from __future__ import annotations

from collections.abc import Collection

from dskd.errors import FailedPreconditionError
from dskquant.engines.protocol import Graph
from dskquant.modes import PrecisionMode

ServedBy = tuple[int, PrecisionMode]
"""Generation and mode."""


class GraphTable:
    """Which graph serves which mode of which generation."""

    def __init__(self) -> None:
        self._graphs: dict[ServedBy, Graph] = {}

    def __getitem__(self, key: ServedBy) -> Graph:
        return self._graphs[key]

    def get(self, key: ServedBy) -> Graph | None:
        return self._graphs.get(key)

    def __contains__(self, key: ServedBy) -> bool:
        return key in self._graphs

    def require(self, key: ServedBy) -> None:
        """Raises FailedPreconditionError unless there is a graph for it."""
        if key not in self._graphs:
            generation, mode = key
            raise FailedPreconditionError(mode.value, f"{mode.value} is not resident in generation {generation}")

    def install(self, generation: int, graph: Graph) -> None:
        """Adds `graph` for all its modes. Raises FailedPreconditionError if one of them has a graph already."""
        keys = [(generation, mode) for mode in graph.modes]
        for key in keys:
            if key in self._graphs:
                mode = key[1].value
                raise FailedPreconditionError(mode, f"{mode} of generation {generation} is already installed")
        self._graphs.update(dict.fromkeys(keys, graph))

    def clear(self) -> None:
        """Forgets all graphs."""
        self._graphs.clear()

    def drop(self, generation: int, modes: Collection[PrecisionMode]) -> None:
        """Forgets graphs. Raises FailedPreconditionError, and forgets none, if one of them is not there."""
        keys = [(generation, mode) for mode in modes]
        for key in keys:
            self.require(key)
        for key in keys:
            del self._graphs[key]
