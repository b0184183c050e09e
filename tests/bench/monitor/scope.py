"""Escalation of single requests: only the one that suffers, and what the others notice of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.bench.monitor import texts
from tests.bench.monitor.live import STREAMS, Answer, Live, live
from tests.bench.report import Section
from tokenizers import Tokenizer

from dskd.engine.request import GenerationRequest, SamplingParams
from dskd.monitor.config import MonitorConfig, ThresholdConfig
from dskd.monitor.states import Scope
from dskquant.modes import PrecisionMode
from dskquant.store import TOKENIZER

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
PIECE, TIMES = 24, 3
NEW = 320
MEASURED_FROM = 192
"""The token of an answer from which on speed is measured: the hard one has been escalated by then."""

REPEATS = 3
HARD_PROMPT = "Es war einmal ein kleines Mädchen, das in einem großen Wald wohnte und jeden Tag"
HARD_TEMPERATURE = 1.2
MARGIN = 2.0
"""The threshold is the geometric mean of the two noises, if they are at least this far apart."""

NEVER = ThresholdConfig(int4=1000.0)


@dataclass(frozen=True, slots=True)
class Round:
    """Eight answers at once, the last one hard."""

    answers: list[Answer]
    kl: Mapping[str, float]  # mean of what was scored, by request

    @property
    def gap_ms(self) -> float:
        """Mean time between two tokens of an easy answer, late in it: every escalated step counts."""
        gaps = [np.diff(answer.arrived[MEASURED_FROM:]) for answer in self.answers[:-1]]
        return float(np.mean(np.concatenate(gaps))) * 1e3

    @property
    def hard_gap_ms(self) -> float:
        """The same of the hard answer, while the others are under way."""
        arrived = np.array(self.answers[-1].arrived)
        others = [answer.arrived for answer in self.answers[:-1]]
        late = arrived[
            (arrived >= max(one[MEASURED_FROM] for one in others)) & (arrived <= min(one[-1] for one in others))
        ]
        return float(np.mean(np.diff(late))) * 1e3 if len(late) > 1 else math.nan


def measure(store: Path, good: Path) -> Section:
    """With FP32 and with the next mode as the target, each in turn with rounds in which nothing is escalated."""
    return asyncio.run(_measure(store, good))


async def _measure(store: Path, good: Path) -> Section:
    free = _config(NEVER, FP32)
    async with live(store, free, resident=(INT4, INT8, FP32), parameters=good) as bench:
        first = await _round(bench, store, "first")
        easy = float(np.mean([first.kl[answer.request.request_id] for answer in first.answers[:-1]]))
        hard = first.kl[first.answers[-1].request.request_id]
        if hard < MARGIN**2 * easy:
            raise RuntimeError(f"the hard answer is not hard: {hard:.3f} against {easy:.3f} nats")
        threshold = float(np.sqrt(easy * hard))
        rounds: dict[str, list[Round]] = {"nobody": [], "fp32": [], "int8": []}
        for repeat in range(REPEATS):
            for name, seen in rounds.items():
                limit = NEVER.int4 if name == "nobody" else threshold
                target = "fp32" if name == "nobody" else name
                await bench.set_monitor(threshold={"int4": limit}, target=target)
                seen.append(await _round(bench, store, f"{name}-{repeat}"))
    rows = [_row(name, seen, rounds["nobody"]) for name, seen in rounds.items()]
    return Section(
        "Noise monitor: scope request",
        f"SmolLM2-135M with a calibrated set, {STREAMS} streams, {NEW} new tokens each: {STREAMS - 1} answers "
        "repeat a "
        f"piece of the Python language reference (mean KL of INT4 {easy:.3f} nats), one goes on with a German tale "
        "at "
        f"temperature {HARD_TEMPERATURE} ({hard:.3f}); threshold {threshold:.3f}, reference FP32, share 0.5. Gap: "
        f"mean time between two tokens of the easy answers from the {MEASURED_FROM}th on, and of the hard one "
        f"meanwhile, median of {REPEATS} interleaved rounds. Escalated requests keep a pace: `escalation_share`, "
        f"{MonitorConfig().escalation_share:.0%} of the time of the others.",
        [
            "escalated to",
            "hard answers escalated",
            "after tokens",
            "easy answers escalated",
            "easy tokens in INT4",
            "gap ms",
            "hard one's gap ms",
            "against nobody escalated",
            "failed",
        ],
        rows,
    )


def _config(threshold: ThresholdConfig, target: PrecisionMode) -> MonitorConfig:
    return MonitorConfig(
        share=0.5,
        time_share=0.5,
        reference=FP32,
        scope=Scope.REQUEST,
        target=target.value,
        threshold=threshold,
        min_agreement=0.0,
    )


async def _round(bench: Live, store: Path, name: str) -> Round:
    pieces = texts.prompts(store, PIECE)
    easy = [_easy_request(f"{name}-{index}", next(pieces)) for index in range(STREAMS - 1)]
    before = len(bench.scores)
    answers = list(await asyncio.gather(*map(bench.answer, [*easy, _hard_request(f"{name}-hard", store)])))
    await bench.settled(INT4)
    by_request: dict[str, list[float]] = {}
    for score in bench.scores[before:]:
        by_request.setdefault(score.request_id, []).extend(score.kl.tolist())
    return Round(answers, {request: float(np.mean(kl)) for request, kl in by_request.items()})


def _easy_request(name: str, text: tuple[int, ...]) -> GenerationRequest:
    """What has been said three times is said again, whatever the precision."""
    return GenerationRequest(name, text * TIMES, NEW)


def _hard_request(name: str, store: Path) -> GenerationRequest:
    """A language that the model has seen little of, and no calibration at all."""
    prompt = Tokenizer.from_file(str(store / TOKENIZER)).encode(HARD_PROMPT).ids
    return GenerationRequest(name, tuple(prompt), NEW, SamplingParams(temperature=HARD_TEMPERATURE, seed=1))


def _row(name: str, rounds: list[Round], control: list[Round]) -> list[str]:
    easy = [answer for seen in rounds for answer in seen.answers[:-1]]
    hard = [_first_above(seen.answers[-1]) for seen in rounds]
    tokens = [token.mode for answer in easy for token in answer.tokens]
    gap, without = (float(np.median([seen.gap_ms for seen in many])) for many in (rounds, control))
    return [
        name,
        f"{sum(first is not None for first in hard)} of {len(hard)}",
        ", ".join(str(first) for first in hard if first is not None) or "-",
        f"{sum(_first_above(answer) is not None for answer in easy)} of {len(easy)}",
        f"{tokens.count(INT4) / len(tokens):.1%}",
        f"{gap:.1f}",
        f"{float(np.median([seen.hard_gap_ms for seen in rounds])):.0f}",
        f"{gap / without:.2f}x",
        str(sum(answer.error is not None for seen in rounds for answer in seen.answers)),
    ]


def _first_above(answer: Answer) -> int | None:
    """The index of the first token that was not made in INT4."""
    return next((index for index, token in enumerate(answer.tokens) if token.mode is not INT4), None)
