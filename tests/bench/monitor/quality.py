"""Speed against noise: what each way of serving costs and gives, on a text that no calibration has seen."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.bench.monitor import pareto, texts
from tests.bench.monitor.live import STREAMS, Live, live, sampled_request
from tests.bench.monitor.offline import Offline, offline
from tests.bench.report import Section

from dskd.monitor.config import MonitorConfig, ThresholdConfig
from dskd.monitor.noise import NoiseWatch
from dskd.monitor.shadow import is_sampled, phase_of
from dskd.monitor.states import Repair, Scope
from dskd.monitor.window import NoiseSample
from dskquant.divergence import Float64, kl_divergence, log_softmax
from dskquant.modes import LADDER, REFERENCE, PrecisionMode

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
WINDOW, PROMPT, BLOCK = 512, 256, 32
WINDOWS = 24
NEW = 128
REPEATS = 3
SHARE = 0.5
"""Of the blocks of an answer that the fallback looks at."""

FACTOR = 0.5
"""Times the mean noise: where a request falls back. Answers differ by more than that, so some do and some do not."""


@dataclass(frozen=True, slots=True)
class Way:
    """How answers are made."""

    name: str
    decode: PrecisionMode
    prefill: PrecisionMode
    falls_back: bool = False


WAYS = (
    Way("INT4", INT4, INT4),
    Way("INT4, prompts in INT8", INT4, INT8),
    Way("INT4, request fallback", INT4, INT4, falls_back=True),
    Way("INT8", INT8, INT8),
    Way("FP32", FP32, FP32),
)


@dataclass(slots=True)
class Quality:
    """Of one way, over the second halves of all windows."""

    kl: list[Float64] = field(default_factory=list)
    loss: list[Float64] = field(default_factory=list)  # negative log-likelihood of the next token, nats
    modes: Counter[PrecisionMode] = field(default_factory=Counter)
    tokens_per_s: float = 0.0

    @property
    def mean_kl(self) -> float:
        return float(np.concatenate(self.kl).mean())

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.concatenate(self.loss).mean()))


def measure(store: Path, good: Path, picture: Path) -> Section:
    """The table, and the picture of it."""
    qualities = {way.name: Quality() for way in WAYS}
    threshold = FACTOR * _score(store, good, qualities)
    asyncio.run(_time(store, good, threshold, qualities))
    points = [(name, one.tokens_per_s, max(one.mean_kl, pareto.FLOOR)) for name, one in qualities.items()]
    pareto.draw(points, picture)
    return Section(
        "Noise monitor: speed against noise",
        f"SmolLM2-135M with a calibrated set (group 64) on {WINDOWS} windows of {WINDOW} tokens of the Python "
        "language "
        f"reference that the calibration has not seen: the first {PROMPT} are the prompt, the others the answer. KL "
        "against FP32, perplexity and share of tokens by mode: of the answers. Request fallback: "
        f"threshold {threshold:.3f} nats ({FACTOR} x the mean of INT4 here), {SHARE:.0%} of the blocks scored, to "
        "FP32, "
        f"re-prefilled. Speed: live, {STREAMS} streams, prompts of {PROMPT} tokens, {NEW} new ones, median of "
        f"{REPEATS} "
        f"interleaved rounds; the fallback's rounds include its scoring, which gets 2 % of the time, so that fewer "
        f"answers fall back there. Picture: {picture.name}.",
        ["served", "perplexity", "mean KL", "tokens by mode", "tokens/s"],
        [_row(name, one) for name, one in qualities.items()],
    )


def _row(name: str, quality: Quality) -> list[str]:
    total = quality.modes.total()
    shares = ", ".join(f"{mode.value} {quality.modes[mode] / total:.0%}" for mode in LADDER if quality.modes[mode])
    return [name, f"{quality.perplexity:.2f}", f"{quality.mean_kl:.4f}", shares, f"{quality.tokens_per_s:.0f}"]


def _score(store: Path, good: Path, qualities: dict[str, Quality]) -> float:
    """Fills in noise and loss; the mean KL of INT4, which the threshold of the fallback follows from."""
    tokens = texts.held_out(store)
    windows = [tokens[begin * WINDOW : (begin + 1) * WINDOW] for begin in range(WINDOWS)]
    with offline(store, [INT4, INT8], WINDOW, good, places=len(WAYS) + 1) as graphs:
        for way in (way for way in WAYS if not way.falls_back):
            _score_way(graphs, windows, way, None, qualities[way.name])
        mean = qualities["INT4"].mean_kl
        for way in (way for way in WAYS if way.falls_back):
            _score_way(graphs, windows, way, FACTOR * mean, qualities[way.name])
    return mean


def _score_way(
    graphs: Offline, windows: Sequence[list[int]], way: Way, threshold: float | None, quality: Quality
) -> None:
    for index, tokens in enumerate(windows):
        reference = np.concatenate(list(graphs.log_probabilities(tokens, REFERENCE, PROMPT)))
        served = _answer(graphs, tokens, way, threshold, reference, f"w{index}", quality.modes)
        quality.kl.append(kl_divergence(reference, served))
        following = np.array(tokens[PROMPT + 1 :])
        quality.loss.append(-served[np.arange(len(following)), following])


def _answer(
    graphs: Offline,
    tokens: list[int],
    way: Way,
    threshold: float | None,
    reference: Float64,
    name: str,
    modes: Counter[PrecisionMode],
) -> Float64:
    """Log-probabilities of the answer's positions, block by block; the decisions are the monitor's own."""
    place = len(WAYS)
    graphs.run(tokens, 0, PROMPT, way.prefill, place)
    watch = NoiseWatch(MonitorConfig(scope=Scope.REQUEST), threshold)
    mode, rows = way.decode, []
    for begin in range(PROMPT, WINDOW, BLOCK):
        served = log_softmax(graphs.run(tokens, begin, begin + BLOCK, mode, place))
        rows.append(served)
        modes[mode] += len(served)
        if not way.falls_back or mode is FP32 or not is_sampled(phase_of(name), begin // BLOCK, SHARE):
            continue
        expected = reference[begin - PROMPT : begin - PROMPT + BLOCK]
        for kl, agrees in zip(kl_divergence(expected, served), expected.argmax(1) == served.argmax(1), strict=True):
            watch.observe(NoiseSample(float(kl), bool(agrees), float(begin)))
        if watch.advance(float(begin), is_scored=True) is not None:
            mode = FP32
            graphs.run(tokens, 0, begin + BLOCK, FP32, place)
    return np.concatenate(rows)


async def _time(store: Path, good: Path, threshold: float, qualities: dict[str, Quality]) -> None:
    rates: dict[str, list[float]] = {way.name: [] for way in WAYS}
    monitor = MonitorConfig(
        share=0.0,
        reference=FP32,
        scope=Scope.REQUEST,
        escalation_share=1.0,  # its speed is that of all answers together
        repair=Repair.REPREFILL,
        threshold=ThresholdConfig(int4=threshold),
    )
    async with live(store, monitor, resident=(INT4, INT8, FP32), parameters=good) as bench:
        for repeat in range(REPEATS):
            for way in WAYS:
                keys = {"prefill": way.prefill.value} if way.prefill is not way.decode else {}
                await bench.set_monitor(share=SHARE if way.falls_back else 0.0, **keys)
                await bench.switch(way.decode)
                rates[way.name].append(await _round(bench, store, f"{way.name}-{repeat}"))
                print(way.name, rates[way.name][-1], sep="\t", flush=True)
    for name, seen in rates.items():
        qualities[name].tokens_per_s = float(np.median(seen))


async def _round(bench: Live, store: Path, name: str) -> float:
    """Tokens a second, prompts included in the time."""
    prompts = texts.prompts(store, PROMPT)
    requests = [sampled_request(f"{name}-{index}", next(prompts), NEW, index) for index in range(STREAMS)]
    began = time.perf_counter()
    answers = await asyncio.gather(*map(bench.answer, requests))
    return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - began)
