"""Steps that nobody asked for, to learn what they take: a choice between two engines must know both of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from dskd.engine.batching import build_batch, build_slot_batch
from dskd.engine.block_pool import BlockPool
from dskd.engine.graph_table import GraphTable
from dskd.engine.request import GenerationRequest
from dskd.engine.sequence import Chunk, Sequence
from dskd.engine.slot_decoder import SlotDecoder, Unexplored
from dskquant.engines.protocol import Graph

RUNS = 2
"""The first one finds cold caches and is not counted."""

NOBODY = GenerationRequest("", (1,), 1)

AloneWith = Callable[[Graph], AbstractContextManager[None]]
"""Keeps other threads off a graph."""


class Explorer:
    """Runs a few steps, in blocks and slots that are free, while nobody waits. Belongs to the step loop's thread."""

    def __init__(self, slots: SlotDecoder, graphs: GraphTable, alone_with: AloneWith) -> None:
        self._slots = slots
        self._graphs = graphs
        self._alone_with = alone_with

    def explore(self, pool: BlockPool) -> None:
        """Times the last decode step on the engine that did not run it, if that has not been known for long.

        Takes two steps, and rarely. No sequence may be open. Raises what graphs raise.
        """
        wanted = self._slots.unexplored(time.monotonic())
        if wanted is None or pool.num_free < wanted.kind.rows:
            return
        chunks = [Chunk(Sequence(NOBODY, wanted.kind.mode), 1) for _ in range(wanted.kind.rows)]
        blocks = pool.allocate(len(chunks))
        try:
            for index, chunk in enumerate(chunks):
                chunk.sequence.blocks = blocks[index : index + 1]
            run = self._step(wanted, chunks, pool.block_size)
            if run is not None:
                self._slots.learn(wanted.kind, [_timed(run) for _ in range(RUNS)][-1])
        finally:
            pool.free(blocks)

    def _step(self, wanted: Unexplored, chunks: list[Chunk], block_size: int) -> Callable[[], object] | None:
        """A step of `chunks`; None: its graph is not in memory."""
        slot_graph, graph = self._slots.graph_of(wanted.served_by), self._graphs.get(wanted.served_by)
        if slot_graph is None or graph is None:
            return None
        if wanted.kind.engine == self._slots.engine_name:
            slot_batch = build_slot_batch(chunks, range(len(chunks)), 0)
            return lambda: slot_graph.run(slot_batch)
        batch = build_batch(chunks, block_size)

        def run() -> None:
            with self._alone_with(graph):
                graph.run(batch)

        return run


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
