"""A damaged parameter set under load: how soon it is noticed, what is served then, and that all is well again."""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.bench.monitor import texts
from tests.bench.monitor.live import STREAMS, Answer, Live, SeenToken, Streams, live
from tests.bench.monitor.offline import offline
from tests.bench.report import Section
from tests.changed_sets import changed_set, scaled

from dskd.engine.sequence import Sequence
from dskd.monitor.bets import samples_to_trip
from dskd.monitor.config import MonitorConfig
from dskd.monitor.shadow import TimeBudget
from dskd.monitor.states import FallbackState, Repair
from dskquant.modes import PrecisionMode

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
LAYER, FACTOR = ".layers.5.", 1.5
PROMPT, NEW = 64, 192
REPEATS = 1
HEALTHY_TOKENS, REPAIRED_TOKENS = 400, 800
KEPT_LOGITS = 600
BLOCK = 32
LIMIT_S = 240.0
DWELL_S = 900.0
"""Of a fallback: no trial falls into what is measured."""

DEFAULT = MonitorConfig(dwell_s=DWELL_S)
THOROUGH = replace(DEFAULT, share=0.25, time_share=0.3)


@dataclass(frozen=True, slots=True)
class Episode:
    """From a damaged set that was committed to a good one that is trusted again."""

    tokens: int  # made by the damaged set in INT4
    samples: int  # of those that were scored
    mean_kl: float  # of all samples of the damaged set
    threshold: float
    trip_s: float
    score_s: float  # mean seconds that a block took to be scored
    after: frozenset[PrecisionMode]  # modes of the damaged generation's tokens once the first FP32 one was made
    repaired_kl: float  # of the tokens served after it, against FP32 run over the same texts
    healthy_tokens: int  # from the good set to HEALTHY


def measure(store: Path, good: Path) -> Section:
    """With the default sampling and with a denser one, and without the repair."""
    with tempfile.TemporaryDirectory() as folder:
        damaged = changed_set(good, Path(folder) / "damaged", scaled(LAYER, FACTOR))
        rows = []
        for sampling, repair in ((DEFAULT, Repair.REPREFILL), (THOROUGH, Repair.REPREFILL), (THOROUGH, Repair.NONE)):
            monitor = replace(sampling, reference=FP32, repair=repair)
            episodes, failed, requests = asyncio.run(_run(store, good, damaged, monitor))
            rows.append(_row(monitor, episodes, failed, requests))
            print(*rows[-1], sep="\t", flush=True)
    return Section(
        "Noise monitor: a damaged parameter set",
        f"SmolLM2-135M under {STREAMS} streams; the scales of one decoder layer x {FACTOR}, let past the proof by "
        "limits "
        "wide open; thresholds from the calibration of the good set, reference FP32. Prediction: `samples_to_trip` "
        "of the noise and threshold at hand, in blocks, which come as fast as the share of the blocks and the share of "
        f"the time allow, and a block of each stream; damages a row: {REPEATS}. KL after the repair: of the logits "
        "that were served, against FP32 over the same texts from an empty cache. Sampling: share of the blocks, and "
        f"of the time at most; the first is the default. A fallback lasts {DWELL_S:.0f} s here, for want of trials in "
        "between.",
        [
            "sampling",
            "repair",
            "mean KL / threshold",
            "predicted tokens",
            "tokens until FP32",
            "samples until then",
            "seconds",
            "modes after",
            "KL after",
            "tokens from good set to healthy",
            "failed requests",
        ],
        rows,
    )


def _row(monitor: MonitorConfig, episodes: list[Episode], failed: int, requests: int) -> list[str]:
    mean_kl, threshold = float(np.mean([one.mean_kl for one in episodes])), episodes[0].threshold
    predicted = np.mean([_predicted(monitor, one) for one in episodes])
    modes = sorted({mode.value for one in episodes for mode in one.after})
    cells = [
        f"{monitor.share:.0%}, {monitor.time_share:.0%}",
        monitor.repair.value,
        f"{mean_kl:.3f} / {threshold:.3f}",
        f"{predicted:.0f}",
    ]
    cells += [_each([one.tokens for one in episodes]), _each([one.samples for one in episodes])]
    cells += [", ".join(f"{one.trip_s:.1f}" for one in episodes), ", ".join(modes)]
    cells += [f"{np.mean([one.repaired_kl for one in episodes]):.6f}", _each([one.healthy_tokens for one in episodes])]
    return [*cells, f"{failed} of {requests}"]


def _predicted(monitor: MonitorConfig, episode: Episode) -> float:
    """Tokens until FP32."""
    samples = samples_to_trip(episode.mean_kl, episode.threshold, monitor.false_trip_samples)
    blocks = math.ceil(samples / BLOCK)
    by_share = blocks * BLOCK / monitor.share
    by_time = blocks * episode.score_s / monitor.time_share * episode.tokens / episode.trip_s
    return max(by_share, by_time) + STREAMS * BLOCK  # a block is scored when it is full


def _each(counts: list[int]) -> str:
    return f"{np.mean(counts):.0f} ({', '.join(map(str, counts))})"


async def _run(store: Path, good: Path, damaged: Path, monitor: MonitorConfig) -> tuple[list[Episode], int, int]:
    kept = 0

    def is_kept(sequence: Sequence) -> bool:
        nonlocal kept
        kept += sequence.mode is FP32
        return sequence.mode is FP32 and kept <= KEPT_LOGITS

    async with live(store, monitor, resident=(INT4, INT8, FP32), parameters=good, keep_logits=is_kept) as bench:
        streams = Streams(bench, texts.prompts(store, PROMPT), NEW)
        halves = []
        for _ in range(REPEATS):
            kept = 0
            halves.append(await _episode(bench, streams, good, damaged))
        answers = await streams.stop()
    finished = {answer.request.request_id: answer for answer in answers}
    episodes = list(_with_repaired_kl(store, halves, finished))
    return episodes, sum(answer.error is not None for answer in answers), len(answers)


@dataclass(frozen=True, slots=True)
class _Half:
    episode: Episode
    repaired: list[SeenToken]


async def _episode(bench: Live, streams: Streams, good: Path, damaged: Path) -> _Half:
    await _grown(bench, streams, HEALTHY_TOKENS)
    bad = (await bench.apply(damaged)).to_generation
    with _spent_on_scoring() as spent:
        await _in_state(bench, streams, FallbackState.TRIPPED)
    await _grown(bench, streams, REPAIRED_TOKENS)
    threshold, score_s = bench.noise(INT4).threshold, float(np.mean(spent))
    await bench.apply(good)
    mended = len(bench.seen)
    await _in_state(bench, streams, FallbackState.HEALTHY)
    by_bad = [token for token in bench.seen if token.generation == bad]
    first = next(index for index, token in enumerate(by_bad) if token.mode is FP32)
    tripped_at = by_bad[first].began
    scores = [score for score in bench.scores if score.generation == bad]
    return _Half(
        Episode(
            tokens=sum(token.mode is INT4 for token in by_bad[:first]),
            samples=sum(int((score.made < tripped_at).sum()) for score in scores if not score.is_probe),
            mean_kl=float(np.concatenate([score.kl for score in scores]).mean()),
            threshold=threshold or float("nan"),
            trip_s=tripped_at - by_bad[0].began,
            score_s=score_s,
            after=frozenset(token.mode for token in by_bad[first:]),
            repaired_kl=float("nan"),
            healthy_tokens=len(bench.seen) - mended,
        ),
        [token for token in by_bad if token.logits is not None],
    )


@contextmanager
def _spent_on_scoring() -> Iterator[list[float]]:
    """Seconds that each block took to be scored."""
    spent: list[float] = []
    spend = TimeBudget.spend

    def seen(budget: TimeBudget, seconds: float) -> None:
        spent.append(seconds)
        spend(budget, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimeBudget, "spend", seen)
        yield spent


async def _grown(bench: Live, streams: Streams, tokens: int) -> None:
    before = len(bench.seen)
    await streams.until(lambda: len(bench.seen) >= before + tokens, f"{tokens} more tokens", LIMIT_S)


async def _in_state(bench: Live, streams: Streams, state: FallbackState) -> None:
    print(f"{time.strftime('%X')} {len(bench.seen)} tokens, waiting for {state.value}", file=sys.stderr, flush=True)
    await streams.until(lambda: bench.noise(INT4).state is state, f"the state {state.value}", LIMIT_S)


def _with_repaired_kl(store: Path, halves: list[_Half], answers: dict[str, Answer]) -> Iterator[Episode]:
    with offline(store, [], PROMPT + NEW) as graphs:
        for half in halves:
            by_request: dict[str, list[SeenToken]] = {}
            for token in half.repaired:
                by_request.setdefault(token.request_id, []).append(token)
            kl = [
                graphs.kl_of(
                    answers[name].text[:-1],
                    [token.position for token in tokens],
                    [token.logits for token in tokens if token.logits is not None],
                )
                for name, tokens in by_request.items()
            ]
            yield replace(half.episode, repaired_kl=float(np.concatenate(kl).mean()))
