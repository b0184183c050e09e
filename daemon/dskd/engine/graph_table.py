"""The graphs a step loop can run, by generation and mode."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import NamedTuple

from dskd.errors import FailedPreconditionError
from dskquant.engines.protocol import Graph
from dskquant.modes import PrecisionMode

ServedBy = tuple[int, PrecisionMode]
"""Generation and mode."""


class Retirement(NamedTuple):
    """Graphs that no new request gets; `done` resolves once they are dropped."""

    keys: frozenset[ServedBy]
    done: Future[None]


class GraphTable:
    """Which graph serves which mode of which generation, and which of them are on their way out."""

    def __init__(self) -> None:
        self._graphs: dict[ServedBy, Graph] = {}
        self._retirements: list[Retirement] = []

    def __getitem__(self, key: ServedBy) -> Graph:
        return self._graphs[key]

    def offers(self, key: ServedBy) -> bool:
        """Whether a new request may be served by it: it is installed, and not retiring."""
        return key in self._graphs and not any(key in retirement.keys for retirement in self._retirements)

    def require(self, key: ServedBy) -> None:
        """Raises FailedPreconditionError unless a new request may be served by it."""
        if not self.offers(key):
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

    def retire(self, generation: int, modes: Collection[PrecisionMode], done: Future[None]) -> None:
        """Offers them no longer. Raises FailedPreconditionError if one of them is not offered as it is."""
        keys = frozenset((generation, mode) for mode in modes)
        for key in keys:
            self.require(key)
        self._retirements.append(Retirement(keys, done))

    def drop_unused(self, in_use: Collection[ServedBy]) -> None:
        """Drops the retiring graphs that serve none of `in_use`, and says so."""
        finished = [retirement for retirement in self._retirements if retirement.keys.isdisjoint(in_use)]
        for retirement in finished:
            self._retirements.remove(retirement)
            for key in retirement.keys:
                del self._graphs[key]
            retirement.done.set_result(None)

    @property
    def has_retirements(self) -> bool:
        return bool(self._retirements)
