"""Whether the monitor's figure is the one that a comparison of whole texts gives for the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.bench.monitor import texts
from tests.bench.monitor.live import STREAMS, Answer, Live, SeenToken, live, sampled_request
from tests.bench.monitor.offline import offline
from tests.bench.report import Section

from dskd.monitor.config import MonitorConfig, ThresholdConfig
from dskd.monitor.types import ModeNoise
from dskquant.divergence import Float64
from dskquant.modes import PrecisionMode

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
PROMPT, NEW = 65, 128
WANTED = 2_100
NEVER = ThresholdConfig(int4=100.0, int8=100.0)


@dataclass(frozen=True, slots=True)
class Run:
    """What was served, and what the monitor made of it."""

    answers: list[Answer]
    scored: dict[str, list[int]]  # positions by request
    noise: ModeNoise


def measure(store: Path) -> Section:
    """INT4 and INT8, with both contexts of the reference."""
    rows = []
    for mode in (INT4, INT8):
        for own_context in (True, False):
            run = asyncio.run(_serve(store, mode, own_context))
            every, same = _offline(store, mode, run)
            seen = run.noise.statistics
            where = "inside" if seen.low <= same.mean() <= seen.high else f"{seen.mean / same.mean():.2f}x"
            tokens = sum(len(answer.tokens) for answer in run.answers)
            cells = [mode.value, "its own" if own_context else "the served", str(tokens), str(len(same))]
            cells += [f"{seen.mean:.5f}", f"{seen.low:.5f} to {seen.high:.5f}", f"{same.mean():.5f}", where]
            rows.append([*cells, f"{every.mean():.5f}"])
            print(*rows[-1], sep="\t", flush=True)
    return Section(
        "Noise monitor: the estimate",
        f"SmolLM2-135M, {STREAMS} streams, prompts of {PROMPT} tokens of the Python language reference, {NEW} new "
        "tokens "
        "at temperature 0.8, reference FP32, share 1. KL in nats per token; offline: the texts of the answers run "
        "through "
        "FP32 and the mode, each from an empty cache, at the positions that were scored, and at all positions of the "
        "answers. A reference that reads the served cache does not see the noise that is in it.",
        [
            "mode",
            "context of the reference",
            "live tokens",
            "scored",
            "monitor",
            "95 % interval",
            "offline, same tokens",
            "offline in the interval",
            "offline, all tokens",
        ],
        rows,
    )


async def _serve(store: Path, mode: PrecisionMode, own_context: bool) -> Run:
    monitor = MonitorConfig(
        share=1.0,
        time_share=1.0,
        reference=FP32,
        own_context=own_context,
        window=100_000,
        window_s=3600.0,
        min_agreement=0.0,
        threshold=NEVER,
    )
    prompts = texts.prompts(store, PROMPT)
    answers: list[Answer] = []
    async with live(store, monitor, resident=(mode, *({INT4, INT8} - {mode}), FP32)) as bench:
        await bench.manager._monitor.decide()  # it scores from the first token on
        while bench.samples(mode) < WANTED:
            names = [f"r{len(answers) + index}" for index in range(STREAMS)]
            requests = [sampled_request(name, next(prompts), NEW, seed) for seed, name in enumerate(names)]
            answers += await asyncio.gather(*map(bench.answer, requests))
            await bench.settled(mode)
        await bench.manager._monitor.decide()
        return Run(answers, _scored_positions(bench), bench.noise(mode))


def _scored_positions(bench: Live) -> dict[str, list[int]]:
    """Each scored token is the one that was being made when its score says it was."""
    made: dict[str, list[SeenToken]] = {}
    for token in bench.seen:
        made.setdefault(token.request_id, []).append(token)
    found: dict[str, list[int]] = {}
    for score in bench.scores:
        tokens = made[score.request_id]
        ends = [token.ended for token in tokens]
        for moment in score.made.tolist():
            token = tokens[int(np.searchsorted(ends, moment))]
            if not token.began <= moment <= token.ended:
                raise RuntimeError("a score of a token that nobody made")
            found.setdefault(score.request_id, []).append(token.position)
    return found


def _offline(store: Path, mode: PrecisionMode, run: Run) -> tuple[Float64, Float64]:
    """KL at all positions of the answers, and at those that were scored."""
    every, same = [], []
    with offline(store, [mode], PROMPT + NEW) as graphs:
        for answer in run.answers:
            kl = graphs.kl(answer.text[:-1], mode, PROMPT - 1)
            every.append(kl)
            positions = run.scored.get(answer.request.request_id, [])
            same.append(kl[np.array(positions, int) - (PROMPT - 1)])
    return np.concatenate(every), np.concatenate(same)
