"""What a swap of parameter sets costs: its phases, and what open streams notice of each; what many swaps leave behind;
what comes back after many kills."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.bench.report import Section
from tests.bench.switching import STREAMS, serving_manager
from tests.changed_sets import changed_set, scaled
from tests.crash_swaps import Ordeal, forked_daemon, make_sets, tables
from tests.daemon_process import connected, daemon_process
from tests.swap_soak import Held, answer_many, swap_under_load

from dskd.engine.request import GenerationRequest
from dskd.manager.manager import QuantizerManager
from dskd.manager.types import Change, ChangeReport, SetReference
from dskquant.modes import PrecisionMode
from dskquant.store import DEFAULT_PARAMETER_SET

APPLIES = 4
QUIET_S = 30.0  # before each: as long as a change under load, as p99 of short spans varies by a factor of two
TOKENS = 400  # of an answer
FACTORS = (1.01, 0.99, 1.02)
PHASES = ("validate", "build", "prove", "commit")
KILLS = 50
WARM_REQUESTS = 5_000
SOAK = {"tiny": 300, "SmolLM2-135M": 12}
SOAK_SHOWN = (1, 10, 12, 100, 200, 300)

Gap = tuple[float, float]
"""The arrivals of a token and of the one before it in its stream, in seconds."""


@dataclass
class Streams:
    """Open answers, one after the other in each stream, and when their tokens arrived."""

    manager: QuantizerManager
    gaps: list[Gap] = field(default_factory=list)
    generations: list[set[int]] = field(default_factory=list)  # of each whole answer
    is_over: bool = False

    async def run(self, index: int) -> None:
        for number in itertools.count():
            if self.is_over:
                return
            await self._answer(GenerationRequest(f"{index}-{number}", tuple(range(100 + index, 116 + index)), TOKENS))

    async def _answer(self, request: GenerationRequest) -> None:
        before, made_by = None, set()
        async for output in self.manager.generate(request):
            now = time.perf_counter()
            if before is not None:
                self.gaps.append((before, now))
            before = now
            made_by |= {token.generation for token in output.tokens}
        self.generations.append(made_by)

    def gaps_ms(self, spans: Sequence[Gap]) -> list[float]:
        """Those that lie in one of `spans`, in part at least."""
        return [(end - begin) * 1e3 for begin, end in self.gaps if any(end > a and begin < b for a, b in spans)]


def measure(store: Path) -> Section:
    """The phases of several applies under load, and the time between two tokens in each."""
    with _sets(store) as sets:
        spans, reports, streams = asyncio.run(_applies(store, sets))
    quiet = float(np.quantile(streams.gaps_ms(spans["quiet"]), 0.99))
    rows = [[name, *_figures(streams, found, quiet)] for name, found in spans.items()]
    flips = [report.flip_us for report in reports]
    labelled = sum(len(made_by) > 1 for made_by in streams.generations)
    kl = "; ".join(_kl(report) for report in reports[:2])
    return Section(
        "Swaps of parameter sets",
        f"SmolLM2-135M, {STREAMS} streams, {APPLIES} applies of sets that differ in the scales of one layer, quiet "
        f"seconds before each. Of {len(streams.generations)} answers none failed, {labelled} have tokens of two "
        f"generations. Flip: {np.median(flips):.0f} µs (at most {max(flips):.0f}). KL before and after: {kl}.",
        ["phase", "ms, median", "between tokens: median ms", "p99 ms", "p99 / quiet"],
        rows,
    )


def _figures(streams: Streams, spans: Sequence[Gap], quiet: float) -> list[str]:
    spent, gaps = np.median([end - begin for begin, end in spans]) * 1e3, streams.gaps_ms(spans)
    p99 = float(np.quantile(gaps, 0.99))
    return [f"{spent:.0f}", f"{np.median(gaps):.1f}", f"{p99:.1f}", f"{p99 / quiet:.2f}x"]


def _kl(report: ChangeReport) -> str:
    return ", ".join(f"{proof.mode.value} {proof.kl_before:.4f} -> {proof.kl_after:.4f}" for proof in report.proofs)


async def _applies(store: Path, sets: Sequence[Path]) -> tuple[Mapping[str, list[Gap]], list[ChangeReport], Streams]:
    spans: defaultdict[str, list[Gap]] = defaultdict(list)
    reports = []
    async with serving_manager(store, (PrecisionMode.INT4, PrecisionMode.INT8)) as manager:
        streams = Streams(manager)
        tasks = [asyncio.create_task(streams.run(index)) for index in range(STREAMS)]
        for path in itertools.islice(itertools.cycle(sets), APPLIES):
            await asyncio.sleep(1.0)  # the graph of before is released
            began = time.perf_counter()
            await asyncio.sleep(QUIET_S)
            spans["quiet"].append((began, time.perf_counter()))
            reports.append(await _apply(manager, path, spans))
        streams.is_over = True
        await asyncio.gather(*tasks)
    return spans, reports, streams


async def _apply(manager: QuantizerManager, path: Path, spans: defaultdict[str, list[Gap]]) -> ChangeReport:
    began = time.perf_counter()
    report = await manager.apply(Change(parameters=SetReference(path)), "bench", dry_run=False, wait=True)
    spans["whole change"].append((began, time.perf_counter()))
    for phase in PHASES:
        ended = began + report.phases_ms[phase] / 1e3
        spans[phase].append((began, ended))
        began = ended
    return report


@contextmanager
def _sets(store: Path) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as folder:
        default = store / DEFAULT_PARAMETER_SET
        yield [changed_set(default, Path(folder) / str(factor), scaled(".layers.5.", factor)) for factor in FACTORS]


def soak(store: Path) -> Section:
    """Many swaps in a row under load: what the daemon holds after some of them."""
    with tempfile.TemporaryDirectory() as folder:
        tiny, sets = make_sets(Path(folder))
        held = {"tiny": asyncio.run(_soak(tables(tiny), sets[1:] + sets[:1], SOAK["tiny"]))}
    with _sets(store) as sets:
        model = {"smollm2": {"path": str(store), "kv_cache_bytes": "128MiB"}}
        held["SmolLM2-135M"] = asyncio.run(_soak(model, sets, SOAK["SmolLM2-135M"]))
    rows = [
        [name, str(count), *_held(found[count - 1], found[9])]
        for name, found in held.items()
        for count in SOAK_SHOWN
        if count <= len(found)
    ]
    return Section(
        "Many swaps in a row",
        "What the process of the daemon holds after so many swaps between three sets, with four answers open. "
        f"{WARM_REQUESTS:,} short requests come first: what is remembered of requests is bounded, and full by then.",
        ["model", "swaps", "RSS MiB", "RSS / after the tenth", "threads", "descriptors", "sets mapped"],
        rows,
    )


def _held(found: Held, tenth: Held) -> list[str]:
    counts = found.threads, found.descriptors, len(found.mapped_sets) + found.deleted
    return [f"{found.rss_mib:.0f}", f"{found.rss_mib / tenth.rss_mib:.3f}x", *map(str, counts)]


async def _soak(models: Mapping[str, Mapping[str, object]], sets: Sequence[Path], swaps: int) -> list[Held]:
    with daemon_process(models) as daemon:
        daemon.start()
        async with connected(daemon) as client:
            await answer_many(client, WARM_REQUESTS)
            return await swap_under_load(client, sets, swaps, streams=4)


def kills() -> Section:
    """kill -9 at random instants during changes under load."""
    ordeal = asyncio.run(_kills())
    rows = [[what, str(count)] for what, count in sorted(ordeal.kills.items())]
    return Section(
        "kill -9 while sets are swapped",
        f"A tiny model under load, {KILLS} kills at random instants. Each time the daemon came back (median "
        f"{np.median(ordeal.starts_s):.1f} s) on a committed generation, answered as its set does, and remembered all "
        f"{len(ordeal.committed)} changes.",
        ["under way at the kill", "times"],
        rows,
    )


async def _kills() -> Ordeal:
    with tempfile.TemporaryDirectory(prefix="dskd-") as folder:
        store, sets = make_sets(Path(folder))
        with forked_daemon(Path(folder), store) as daemon:
            ordeal = Ordeal(daemon, sets, random.Random(time.time_ns()))
            await ordeal.record()
            for _ in range(KILLS):
                await ordeal.round()
            await ordeal.end()
    return ordeal
