"""What a switch costs: its parts for every ordered pair of modes, and what open streams notice of it."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from tests.bench.report import Section

from dskd.config import ModelConfig, ProofConfig, SchedulerConfig
from dskd.engine.request import GenerationRequest, InFlight
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.manager import QuantizerManager
from dskd.manager.types import SwitchReport
from dskd.units import ByteSize
from dskquant.engines import load_engine
from dskquant.modes import LADDER, PrecisionMode

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
STREAMS = 8
TOKENS = 40
REPEATS = 5
EVERY_STEPS = 8


@asynccontextmanager
async def serving_manager(store: Path, resident: Sequence[PrecisionMode]) -> AsyncIterator[QuantizerManager]:
    config = ModelConfig(
        path=store,
        resident=tuple(resident),
        default_mode=resident[0],
        kv_cache_bytes=ByteSize(512 << 20),
        on_demand_ttl_s=0.0,
        proof=ProofConfig(max_kl=100.0, min_agreement=0.0),  # random weights have next to no opinion to agree on
    )
    with tempfile.TemporaryDirectory() as state:
        manager = QuantizerManager(
            "bench", config, SchedulerConfig(), load_engine("openvino"), Path(state), EventBus(), History()
        )
        await manager.start()
        try:
            yield manager
        finally:
            await manager.close(0)


def measure_pairs(store: Path) -> Section:
    """Every ordered pair, with the target in memory and, where it does not share its graph with the source, not."""
    resident = asyncio.run(_resident_pairs(store))
    prepared = asyncio.run(_prepared_pairs(store))
    rows = []
    for pair, reports in resident.items():
        flips = [report.flip_us for report in reports]
        cells = [pair[0].value, pair[1].value, f"{np.median(flips):.0f}", f"{max(flips):.0f}"]
        cells.append(f"{np.median([report.total_ms for report in reports]):.1f}")
        rows.append([*cells, f"{prepared[pair].prepare_ms:.0f}" if pair in prepared else "shares its graph"])
    return Section(
        "Switches",
        f"SmolLM2-135M with {STREAMS} open streams. Flip: loop time. Request to flip: with the "
        f"fsync of the state file and "
        "the end of the step under way. Preparation: memory check, compile, warm-up and proof of a "
        "mode that was not in "
        f"memory, beside the streams. Medians of {REPEATS}; preparation once.",
        ["from", "to", "flip µs", "flip µs, max", "request to flip ms", "preparation ms"],
        rows,
    )


Pair = tuple[PrecisionMode, PrecisionMode]


async def _resident_pairs(store: Path) -> dict[Pair, list[SwitchReport]]:
    reports: dict[Pair, list[SwitchReport]] = {pair: [] for pair in itertools.permutations(LADDER, 2)}
    async with serving_manager(store, LADDER) as manager, _streams(manager):
        for (from_mode, to_mode), seen in reports.items():
            for _ in range(REPEATS):
                await manager.switch(from_mode, InFlight.MIGRATE, "bench", wait=True)
                seen.append(await manager.switch(to_mode, InFlight.MIGRATE, "bench", wait=True))
    return reports


async def _prepared_pairs(store: Path) -> dict[Pair, SwitchReport]:
    """The mode that is kept in memory is never the target, so that every target has to be built."""
    reports = {}
    for kept, targets in ((FP32, (INT4, INT8)), (INT4, (PrecisionMode.FP16, FP32))):
        for from_mode, to_mode in itertools.product(LADDER, targets):
            if from_mode is not to_mode and {from_mode, to_mode} != {INT4, INT8}:
                async with serving_manager(store, [kept]) as manager, _streams(manager):
                    await manager.switch(from_mode, InFlight.MIGRATE, "bench", wait=True)
                    reports[from_mode, to_mode] = await manager.switch(to_mode, InFlight.MIGRATE, "bench", wait=True)
    return reports


@asynccontextmanager
async def _streams(manager: QuantizerManager) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(_answer(manager, f"s{index}", 100_000 // STREAMS)) for index in range(STREAMS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(manager: QuantizerManager, name: str, tokens: int) -> list[float]:
    """Arrival times of the tokens of one answer."""
    request = GenerationRequest(name, tuple(range(100, 116)), min(tokens, 8_000))
    return [time.perf_counter() async for output in manager.generate(request) for _ in output.tokens]


def measure_gaps(store: Path) -> Section:
    """Inter-token times of open streams with and without switches between INT4 and INT8."""
    gaps = asyncio.run(_gaps(store))
    rows = [
        [name, *(f"{np.quantile(values, q) * 1e3:.1f}" for q in (0.5, 0.99)), f"{max(values) * 1e3:.1f}"]
        for name, values in gaps.items()
    ]
    slower = max(np.quantile(gaps[name], 0.99) for name in ("int4", "int8"))
    ratio = np.quantile(gaps["switching"], 0.99) / slower
    return Section(
        "What streams notice of a switch",
        f"1.5B random Llama, {STREAMS} streams, time between two tokens of a stream in ms, rounds "
        f"interleaved. Switching: "
        f"INT4 and INT8 in turn every {EVERY_STEPS} steps. Its p99 is {ratio:.2f}x of the slower mode's own.",
        ["round", "median", "p99", "max"],
        rows,
    )


async def _gaps(store: Path) -> dict[str, list[float]]:
    gaps: dict[str, list[float]] = {"int4": [], "int8": [], "switching": []}
    async with serving_manager(store, (INT4, INT8)) as manager:
        for repeat in range(REPEATS):
            for name, seen in gaps.items():
                modes = (INT4, INT8) if name == "switching" else (PrecisionMode(name),)
                seen += await _round(manager, f"{name}-{repeat}", modes)
    return gaps


async def _round(manager: QuantizerManager, name: str, modes: Sequence[PrecisionMode]) -> list[float]:
    await manager.switch(modes[0], InFlight.MIGRATE, "bench", wait=True)
    answers = [asyncio.create_task(_answer(manager, f"{name}-{index}", TOKENS)) for index in range(STREAMS)]
    modes_in_turn = itertools.cycle(modes)
    while len(modes) > 1 and not all(answer.done() for answer in answers):
        await manager.switch(next(modes_in_turn), InFlight.MIGRATE, "bench", wait=True)
        steps = manager.snapshot().loop.steps
        await _steps_done(manager, steps + EVERY_STEPS, answers)
    times = [await answer for answer in answers]
    # the first gaps are those of the prompts
    return [gap for arrivals in times for gap in np.diff(arrivals)[2:]]


async def _steps_done(manager: QuantizerManager, steps: int, answers: Sequence[asyncio.Task[list[float]]]) -> None:
    """Looks now and then: a benchmark must not add events to the loop it measures."""
    while manager.snapshot().loop.steps < steps and not all(answer.done() for answer in answers):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
