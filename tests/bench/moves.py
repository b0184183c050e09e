"""What it costs a stream to move from one engine to the other: the time to copy its keys and values, in steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.bench.report import Section

from dskd import huge_pages
from dskd.engine.batching import build_batch, build_slot_batch
from dskd.engine.request import GenerationRequest
from dskd.engine.sequence import Chunk
from dskd.engine.sequence import Sequence as EngineSequence
from dskd.engine.slots import SlotTable
from dskd.manager.second_engine import SLOTS
from dskquant.engines import load_engine, load_slot_engine
from dskquant.engines.protocol import CompileOptions
from dskquant.modes import PrecisionMode

CONTEXT = 512
MOVES = 12
STEPS = 4
"""Between two moves."""

INT4 = PrecisionMode.INT4
SLOT_BYTES = 2 << 30


class Mover:
    """One sequence of `CONTEXT` tokens, and graphs of both engines that can go on with it."""

    def __init__(self, store: Path) -> None:
        options = CompileOptions()
        engine, slot_engine = load_engine("openvino"), load_slot_engine("onnxruntime")
        self._graph = engine.compile(store, options.graph_key(INT4), options)
        self._slot_graph = slot_engine.compile(store, options.graph_key(INT4), options)
        blocks = -(-(CONTEXT + 2 * (MOVES + 1) * STEPS) // engine.block_size)
        self._pages = self._graph.allocate_cache(blocks)
        slots = slot_engine.allocate_cache(store, SLOTS, SLOT_BYTES)
        self._graph.bind(self._pages)
        self._slot_graph.bind(slots)
        self._table = SlotTable(slots, self._pages)
        tokens = tuple(np.random.default_rng(0).integers(10, 40_000, CONTEXT).tolist())
        self._sequence = EngineSequence(GenerationRequest("a", tokens, 1), INT4)
        self._sequence.blocks = np.arange(blocks, dtype=np.int32)
        self._graph.run(build_batch([Chunk(self._sequence, CONTEXT)], engine.block_size))
        self._sequence.num_cached = CONTEXT

    def forget(self) -> None:
        """Nothing of the sequence is in a slot any more."""
        self._table.update_blocks(self._sequence)
        self._table.forget(self._sequence)

    def to_slots(self) -> None:
        self._first = self._table.gather([self._sequence])

    def to_blocks(self) -> None:
        self._table.update_blocks(self._sequence)

    def step_in_slots(self) -> None:
        self._step(self._run_in_slots)

    def step_in_blocks(self) -> None:
        self._step(lambda: self._graph.run(build_batch([Chunk(self._sequence, 1)], self._pages.block_size)))

    def close(self) -> None:
        self._graph.close()
        self._slot_graph.close()

    def _run_in_slots(self) -> None:
        slots = [self._table.slot_of(self._sequence)]
        self._slot_graph.run(build_slot_batch([Chunk(self._sequence, 1)], slots, self._first))
        self._table.note_run([self._sequence])

    def _step(self, run: Callable[[], object]) -> None:
        self._sequence.tokens.append(5)
        run()
        self._sequence.num_cached += 1


def measure(stores: dict[str, Path]) -> Section:
    """Moves of a sequence all of which must be copied, and back again."""
    return Section(
        "Moves between the engines",
        f"One stream in INT4 with {CONTEXT} tokens of context and more, 8-bit pages on the side of OpenVINO, float32 "
        f"slots on that of ONNX Runtime; medians of {MOVES} moves to and fro, {STEPS} steps after each. All of its "
        "context is copied into a slot; back go the tokens that were made there, with the begun block. In steps: of "
        "the engine it leaves.",
        ["model", "move", "ms", "step before ms", "in steps"],
        [row for name, store in stores.items() for row in _rows(name, store)],
    )


def _rows(name: str, store: Path) -> list[list[str]]:
    mover = Mover(store)
    taken: dict[str, list[float]] = {}
    for move in range(MOVES + 1):
        here = _times(mover.step_in_blocks)
        there = _seconds(mover.to_slots), _times(mover.step_in_slots), _seconds(mover.to_blocks)
        mover.forget()
        if move == 0:  # it has packed the weights
            huge_pages.collapse()
        else:
            for key, seconds in zip(("blocks", "in", "slots", "out"), (here, *there), strict=True):
                taken.setdefault(key, []).append(seconds)
    mover.close()
    medians = {key: float(np.median(values)) for key, values in taken.items()}
    return [
        _row(name, f"{CONTEXT} tokens and more into a slot", medians["in"], medians["blocks"]),
        _row(name, f"{STEPS} tokens back", medians["out"], medians["slots"]),
    ]


def _row(name: str, move: str, seconds: float, step_s: float) -> list[str]:
    return [name, move, f"{seconds * 1e3:.1f}", f"{step_s * 1e3:.1f}", f"{seconds / step_s:.2f}"]


def _times(step: Callable[[], None]) -> float:
    """Seconds of the median step."""
    return float(np.median([_seconds(step) for _ in range(STEPS)]))


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
