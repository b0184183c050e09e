"""What measuring costs: throughput with and without it, in interleaved rounds of the same requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.bench.monitor import texts
from tests.bench.monitor.live import STREAMS, Live, live, sampled_request
from tests.bench.report import Section

from dskd.monitor.config import MonitorConfig, ThresholdConfig
from dskquant.modes import PrecisionMode

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
PROMPT, NEW = 32, 96
REPEATS = 24
NOTHING, HEALTH = "nothing measured", "health alone"
NEVER = ThresholdConfig(int4=1000.0)
"""Random weights agree with nothing."""


def measure(store: Path) -> Section:
    """Health, and the default sampling with INT8 and with FP32 as the reference."""
    rows = asyncio.run(_measure(store, INT8, [NOTHING, HEALTH, "INT8 reference"]))
    rows += asyncio.run(_measure(store, FP32, [HEALTH, "FP32 reference"]))
    return Section(
        "Noise monitor: overhead",
        f"1.5B random Llama in INT4, {STREAMS} streams, prompts of {PROMPT} tokens, {NEW} new ones, default "
        "sampling (5 % "
        f"of the blocks, at most 2 % of the time); {REPEATS} turns, every other one reversed. Ratio to the line "
        "above: of the two rounds of a turn, geometric mean with its standard error. Time spent: by the step loop in "
        "the parts that measure, over the time of the round.",
        ["measured", "tokens/s", "ratio to the line above", "time spent by the loop", "scored tokens a round"],
        rows,
    )


async def _measure(store: Path, reference: PrecisionMode, arms: list[str]) -> list[list[str]]:
    monitor = MonitorConfig(reference=reference, threshold=NEVER, min_agreement=0.0)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    shares: dict[str, list[float]] = {name: [] for name in arms}
    scored: dict[str, list[int]] = {name: [] for name in arms}
    resident = tuple(dict.fromkeys((INT4, INT8, reference)))
    async with live(store, monitor, resident=resident, kv_cache_bytes=1 << 30) as bench:
        for repeat in range(REPEATS + 1):
            for name in arms if repeat % 2 else reversed(arms):
                await bench.set_monitor(share=0.0 if name in (NOTHING, HEALTH) else MonitorConfig().share)
                before = bench.samples(INT4)
                with _timed(bench, health=name != NOTHING) as spent:
                    seconds, tokens = await _round(bench, store, f"{name}-{repeat}")
                if repeat > 0:  # the first one packs weights
                    rates[name].append(tokens / seconds)
                    shares[name].append(sum(spent.values()) / seconds)
                    scored[name].append(bench.samples(INT4) - before)
                print(name, f"{tokens / seconds:.1f}", bench.samples(INT4) - before, dict(spent), sep="\t", flush=True)
    return [_row(name, before, rates, shares, scored) for name, before in zip(arms, [None, *arms], strict=False)]


async def _round(bench: Live, store: Path, name: str) -> tuple[float, int]:
    prompts = texts.prompts(store, PROMPT)
    requests = [sampled_request(f"{name}-{index}", next(prompts), NEW, index) for index in range(STREAMS)]
    began = time.perf_counter()
    answers = await asyncio.gather(*map(bench.answer, requests))
    return time.perf_counter() - began, sum(len(answer.tokens) for answer in answers)


@contextmanager
def _timed(bench: Live, *, health: bool) -> Iterator[Mapping[str, float]]:
    """Seconds that the loop's thread spends in each part that measures; without `health` that part is left out."""
    core = bench.manager._loop._core
    parts: dict[str, tuple[Any, str]] = {
        "health": (core, "_look_at_health"),
        "record": (core._scorer, "record"),
        "score": (core._scorer, "run_next"),
    }
    spent = dict.fromkeys(parts, 0.0)
    former = {part: getattr(owner, name) for part, (owner, name) in parts.items()}

    def timing(part: str, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            began = time.perf_counter()
            call(*args)
            spent[part] += time.perf_counter() - began

        return timed

    for part, (owner, name) in parts.items():
        setattr(owner, name, timing(part, former[part]) if health or part != "health" else lambda *_: None)
    try:
        yield spent
    finally:
        for part, (owner, name) in parts.items():
            setattr(owner, name, former[part])


def _row(
    name: str,
    before: str | None,
    rates: Mapping[str, list[float]],
    shares: Mapping[str, list[float]],
    scored: Mapping[str, list[int]],
) -> list[str]:
    return [
        name,
        f"{np.median(rates[name]):.1f}",
        _ratio(rates[name], rates[before]) if before else "-",
        f"{np.mean(shares[name]):.2%}",
        f"{np.mean(scored[name]):.0f}",
    ]


def _ratio(rates: list[float], before: list[float]) -> str:
    logs = np.log(rates) - np.log(before)
    mean, error = float(logs.mean()), float(logs.std(ddof=1) / np.sqrt(len(logs)))
    return f"{np.exp(mean):.3f} ± {np.exp(mean) * error:.3f}"
