"""Requests to a plain graph that wait, and which of them share a batch. Plain objects: no thread, no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dskd.config import BatchingConfig
from dskd.plain.request import TensorRequest
from dskquant.modes import PrecisionMode

GraphKey = tuple[int, PrecisionMode]
"""Generation and mode."""

ALONE = BatchingConfig(max_size=1)


@dataclass(eq=False, slots=True)
class Waiting:
    """A request in the line."""

    request: TensorRequest
    reply: Any  # whatever the answer goes to
    arrived: float  # seconds of `time.perf_counter`
    rows: int
    shapes: object  # requests that agree on it may share a batch; see `shapes_of`
    generation: int  # that served when it came, and has a graph of the mode that it asks for
    stays: GraphKey | None = None  # what a flip has left it on


def shapes_of(request: TensorRequest) -> object:
    """What the inputs of a batch have in common: all sizes but the first."""
    return tuple(sorted((name, tensor.shape[1:]) for name, tensor in request.tensors.items()))


class WaitingLine:
    """In order of arrival. Requests of one batch are neighbours among those that agree on graph and shapes."""

    def __init__(self, limits: BatchingConfig) -> None:
        self._limits = limits
        self._line: dict[Waiting, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._line)

    def add(self, entry: Waiting) -> None:
        self._line[entry] = None

    def remove(self, entry: Waiting) -> bool:
        """Whether it was there."""
        return self._line.pop(entry, self) is None

    def take(self, now: float, graph_of: Callable[[Waiting], GraphKey]) -> list[Waiting]:
        """The next batch, if one is due: it is full, of a preferred size, or its first request has waited long enough.

        A single request with more rows than a batch may have is a batch of its own.
        """
        for group in self._groups(graph_of):
            batch = self._due(group, now)
            if batch:
                for entry in batch:
                    del self._line[entry]
                return batch
        return []

    def patience(self, now: float) -> float:
        """Seconds until the first request has waited long enough; infinity while none waits."""
        first = next(iter(self._line), None)
        return math.inf if first is None else max(0.0, first.arrived + self._delay_s - now)

    def lacking_rows(self, graph_of: Callable[[Waiting], GraphKey]) -> int:
        """The least number of rows with which a batch could become full, or of a preferred size."""
        have = [0, *(sum(entry.rows for entry in group) for group in self._groups(graph_of))]
        sizes = (*self._limits.preferred_sizes, self._limits.max_size)
        return min(size - rows for rows in have for size in sizes if size > rows)

    @property
    def _delay_s(self) -> float:
        return 0.0 if self._limits.max_size == 1 else self._limits.max_delay_ms / 1e3

    def _groups(self, graph_of: Callable[[Waiting], GraphKey]) -> list[list[Waiting]]:
        """The requests that may share a batch, the group of the first request first."""
        groups: dict[object, list[Waiting]] = {}
        for entry in self._line:
            groups.setdefault((graph_of(entry), entry.shapes), []).append(entry)
        return list(groups.values())

    def _due(self, group: Sequence[Waiting], now: float) -> list[Waiting]:
        taken, preferred, rows = 0, 0, 0
        for entry in group:
            if taken and rows + entry.rows > self._limits.max_size:
                break
            taken, rows = taken + 1, rows + entry.rows
            if rows in self._limits.preferred_sizes:
                preferred = taken
        is_full = taken < len(group) or rows >= self._limits.max_size
        if is_full or now >= group[0].arrived + self._delay_s:
            return list(group[:taken])
        return list(group[:preferred])
