"""How long decode steps of a new graph take, found out before it serves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from dskd.engine.step_times import StepKind, StepTimes
from dskquant.engines.protocol import Engine, Graph, Logits, SlotGraph
from dskquant.forward import Chunk, batch_of, blocks_for, slot_batch_of
from dskquant.modes import PrecisionMode

ROWS = (1, 2, 4, 8)
STEPS = 8
"""Of each number of rows; the first one is not counted, and of the others the fastest."""

TEXT = tuple(range(1, STEPS + 1))

InTurn = Callable[[Callable[[], float]], float]
"""Does a piece of work at the priority of steps that are served, and while none of them runs."""


def measure_paged(graph: Graph, engine: Engine, mode: PrecisionMode, in_turn: InTurn, times: StepTimes) -> None:
    """Puts the times of steps of `mode` into `times`. Leaves a scratch cache bound to `graph`."""

    def step(rows: int, position: int) -> Callable[[], Logits]:
        chunks = [Chunk(TEXT, position, position + 1, 0, first_block=row * blocks) for row in range(rows)]
        return partial(graph.run, batch_of(chunks, mode, engine.block_size))

    blocks = blocks_for(STEPS, engine.block_size)
    graph.bind(graph.allocate_cache(max(ROWS) * blocks))
    _note(_fastest(step, in_turn), engine.name, mode, times)


def measure_slots(graph: SlotGraph, engine: str, mode: PrecisionMode, in_turn: InTurn, times: StepTimes) -> None:
    """`measure_paged` of a slot graph."""

    def step(rows: int, position: int) -> Callable[[], Logits]:
        wanted = [range(position, position + 1)] * rows
        return partial(graph.run, slot_batch_of([TEXT] * rows, position, position + 1, wanted, mode))

    graph.bind(graph.allocate_cache(max(ROWS)))
    _note(_fastest(step, in_turn), engine, mode, times)


def _fastest(step: Callable[[int, int], Callable[[], Logits]], in_turn: InTurn) -> dict[int, float]:
    """Seconds of the fastest step by number of rows; `step` makes that of some rows at a position."""
    return {rows: min([in_turn(partial(seconds_of, step(rows, at))) for at in range(STEPS)][1:]) for rows in ROWS}


def seconds_of(run: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _note(seconds: dict[int, float], engine: str, mode: PrecisionMode, times: StepTimes) -> None:
    """Fewer rows never take longer: where they seem to, something else held them up."""
    fastest = math.inf
    for rows in reversed(ROWS):
        fastest = min(fastest, seconds[rows])
        times.set(StepKind(engine, mode, rows), fastest)
