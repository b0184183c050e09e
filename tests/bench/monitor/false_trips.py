"""Healthy parameter sets over many tokens: whether the monitor ever trips, and how near it came."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from tests.bench.monitor import texts
from tests.bench.monitor.live import STREAMS, Streams, live
from tests.bench.report import Section

from dskd.monitor.config import MonitorConfig
from dskquant.modes import PrecisionMode

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
TOKENS = 20_000
PROMPT, NEW = 64, 192
LIMIT_S = 900.0


def measure(store: Path, good: Path) -> Section:
    """INT4 and INT8 of a calibrated set, with the thresholds that follow from its calibration."""
    rows = [asyncio.run(_serve(store, good, mode)) for mode in (INT8, INT4)]
    return Section(
        "Noise monitor: false trips",
        f"SmolLM2-135M with a calibrated set, {STREAMS} streams, prompts of {PROMPT} tokens of the Python language "
        f"reference, {NEW} new tokens at temperature 0.8; reference FP32, every block scored that time allows "
        "(share 1), "
        "thresholds: twice the noise that the calibration has measured. Evidence: the highest seen; it trips at "
        "ln 100,000 = 11.5.",
        [
            "mode",
            "live tokens",
            "scored",
            "mean KL",
            "expected by the calibration",
            "threshold",
            "highest evidence",
            "trips",
        ],
        rows,
    )


async def _serve(store: Path, good: Path, mode: PrecisionMode) -> list[str]:
    monitor = MonitorConfig(share=1.0, time_share=1.0, reference=FP32)
    highest = 0.0

    def is_done() -> bool:
        nonlocal highest
        highest = max(highest, bench.noise(mode).evidence)
        return len(bench.seen) >= TOKENS

    resident = (mode, *({INT4, INT8} - {mode}), FP32)
    async with live(store, monitor, resident=resident, parameters=good) as bench:
        streams = Streams(bench, texts.prompts(store, PROMPT), NEW)
        await streams.until(is_done, f"{TOKENS} tokens", LIMIT_S)
        await streams.stop()
        noise = bench.noise(mode)
    mean = np.concatenate([score.kl for score in bench.scores]).mean()
    cells = [mode.value, str(len(bench.seen)), str(noise.total_samples), f"{mean:.4f}"]
    threshold = noise.threshold or float("nan")
    cells += [f"{threshold / monitor.factor:.4f}", f"{threshold:.4f}", f"{highest:.1f}", str(noise.trips)]
    print(*cells, sep="\t", flush=True)
    return cells
