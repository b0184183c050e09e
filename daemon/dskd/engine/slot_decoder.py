"""Decode steps of a few sequences on a second engine, in slots, where that is faster."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dskd.engine.batching import build_slot_batch
from dskd.engine.engine_choice import Choice, Situation
from dskd.engine.graph_table import ServedBy
from dskd.engine.sequence import Chunk, Sequence
from dskd.engine.slots import SlotTable
from dskd.engine.step_times import LEARNING_RATE, StepKind, StepTimes
from dskquant.engines.protocol import KVCache, Logits, SlotCache, SlotGraph
from dskquant.modes import LADDER, PrecisionMode


@dataclass(frozen=True, slots=True)
class SecondEngine:
    """An engine over slots, beside the one that serves everything."""

    name: str
    cache: SlotCache
    choice: Choice
    times: StepTimes
    explores: bool = False  # whether the choice needs to know the times of both engines


class Unexplored(NamedTuple):
    """A step of which nothing has been learned for long."""

    served_by: ServedBy
    kind: StepKind


STALE_S = 60.0
"""Times are found out anew after so long, when nobody waits."""

LONG_AGO = 1 << 30
"""Steps since a move that never was."""


@dataclass(slots=True)
class _Whereabouts:
    """Of the sequences that one graph serves."""

    in_slots: bool = False
    steps: int = LONG_AGO


class SlotDecoder:
    """Belongs to the step loop's thread."""

    def __init__(self, second: SecondEngine, paged_engine: str, pages: KVCache) -> None:
        """`paged_engine` serves what `second` does not, in the blocks of `pages`."""
        self.engine_name = second.name
        self.num_moves = 0
        self._choice = second.choice
        self._times = second.times
        self._paged_engine = paged_engine
        self._table = SlotTable(second.cache, pages)
        self._graphs: dict[ServedBy, SlotGraph] = {}
        self._whereabouts: dict[frozenset[PrecisionMode], _Whereabouts] = {}
        self._load_s = 0.0  # a token
        self._explores = second.explores
        self._last: Unexplored | None = None  # what the engine that did not run the last decode step would have run

    @property
    def num_used_slots(self) -> int:
        return self._table.num_used

    def install(self, generation: int, graph: SlotGraph) -> None:
        """Makes `graph`, bound to the slots, available for its modes."""
        self._graphs.update({(generation, mode): graph for mode in graph.modes})

    def drop(self, generation: int, modes: Collection[PrecisionMode]) -> None:
        """Forgets the graphs of these modes, as far as there are any."""
        for mode in modes:
            self._graphs.pop((generation, mode), None)

    def forget(self, sequence: Sequence) -> None:
        """Frees the slot of `sequence`, which is about to give its blocks back."""
        self._table.forget(sequence)

    def vacate(self) -> None:
        """Frees all slots."""
        self._table.clear()

    def close(self) -> None:
        """Lets go of all graphs and slots."""
        self._graphs.clear()
        self.vacate()

    def graph_for(self, decodes: list[Chunk], num_decodes: int) -> SlotGraph | None:
        """The graph that makes the next tokens of `decodes`, which one paged graph serves; None: that one does.

        `num_decodes`: all decodes of this step, those of other graphs included.
        """
        graphs = {self._graphs.get(chunk.sequence.served_by) for chunk in decodes}
        graph = graphs.pop() if len(graphs) == 1 else None
        if graph is None:
            return None
        group = [chunk.sequence for chunk in decodes]
        has_room = num_decodes <= self._table.num_slots and self._table.fit(group)
        return graph if self._goes_in_slots(graph, group, has_room) else None

    def run(self, graph: SlotGraph, decodes: list[Chunk]) -> Logits:
        """Logits [n, vocabulary] of `decodes`, in their order. Raises what `SlotGraph.run` raises."""
        group = [chunk.sequence for chunk in decodes]
        first = self._gather(group)
        batch = build_slot_batch(decodes, [self._table.slot_of(sequence) for sequence in group], first)
        began = time.perf_counter()
        logits = graph.run(batch)
        self._table.note_run(group)
        self._learn(self.engine_name, group, time.perf_counter() - began)
        return logits

    def leave(self, group: Iterable[Sequence]) -> None:
        """Sees that the blocks of `group` hold all its tokens: a paged graph runs next."""
        for sequence in group:
            self._table.update_blocks(sequence)

    def learn_paged(self, chunks: list[Chunk], seconds: float) -> None:
        """Notes what a step of the paged engine took, if slots could have run all of it."""
        if len(chunks) <= self._table.num_slots and all(chunk.is_decode for chunk in chunks):
            self._learn(self._paged_engine, [chunk.sequence for chunk in chunks], seconds)

    def graph_of(self, served_by: ServedBy) -> SlotGraph | None:
        return self._graphs.get(served_by)

    def unexplored(self, now: float) -> Unexplored | None:
        """The last decode step as the other engine would run it, if that is not known, or has not been for long."""
        if not self._explores or self._last is None or now - self._times.learned(self._last.kind) < STALE_S:
            return None
        return self._last

    def learn(self, kind: StepKind, seconds: float) -> None:
        """Notes what a step took."""
        self._times.learn(kind, seconds)

    def _goes_in_slots(self, graph: SlotGraph, group: list[Sequence], has_room: bool) -> bool:
        where = self._whereabouts.setdefault(graph.modes, _Whereabouts())
        in_slots = has_room and self._choice(self._situation(where, group))
        where.steps += 1
        if in_slots is not where.in_slots:
            where.in_slots, where.steps = in_slots, 0
            self.num_moves += 1
        return in_slots

    def _situation(self, where: _Whereabouts, group: list[Sequence]) -> Situation:
        mode, rows = _slowest(group).mode, len(group)
        return Situation(
            where.in_slots,
            where.steps,
            self._times.estimate(StepKind(self._paged_engine, mode, rows)),
            self._times.estimate(StepKind(self.engine_name, mode, rows)),
            self._load_s * self._table.missing_tokens(group),
        )

    def _gather(self, group: list[Sequence]) -> int:
        missing = self._table.missing_tokens(group)
        began = time.perf_counter()
        first = self._table.gather(group)
        if missing:
            spent = (time.perf_counter() - began) / missing
            self._load_s += (LEARNING_RATE if self._load_s else 1.0) * (spent - self._load_s)
        return first

    def _learn(self, engine: str, group: list[Sequence], seconds: float) -> None:
        slowest = _slowest(group)
        self.learn(StepKind(engine, slowest.mode, len(group)), seconds)
        other = self._paged_engine if engine == self.engine_name else self.engine_name
        self._last = Unexplored(slowest.served_by, StepKind(other, slowest.mode, len(group)))


def _slowest(group: Iterable[Sequence]) -> Sequence:
    """That of the most exact mode of a step: a row of INT8 costs all of them a pass over the residual plane."""
    return max(group, key=lambda sequence: LADDER.index(sequence.mode))
