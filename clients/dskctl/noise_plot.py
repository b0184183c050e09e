"""KL over time as a picture, with what served meanwhile. matplotlib is needed for it alone, and imported late."""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dskapi.v1.control_pb2 import GetNoiseResponse, HistoryEntry, NoisePoint
from dskctl.exits import UsageError
from dskctl.noise_samples import Recording
from dskctl.served_spans import ServedSpan, served_spans
from dskctl.words import is_ratio, mode_word, noise_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
SIZE_INCHES = (12.0, 6.75)
DOTS_PER_INCH = 120
COLOURS = {"int4": "#d55e00", "int8": "#009e73", "fp16": "#56b4e9", "fp32": "#7b3fa0"}
"""Told apart with every kind of colour vision (Okabe & Ito 2008, "Color Universal Design")."""

OTHER_COLOUR = "#666666"
FALLBACK_COLOUR = "#cc0000"
SMALLEST = 1e-6
"""Nats; what is below, zero too, is drawn here."""

LABEL_SHARE = 0.08
"""Of the width of the picture that a stretch of time needs to be labelled."""

RUNNING = 50
"""Samples that a point of the running mean is made of."""


def require_matplotlib() -> None:
    """Raises UsageError when it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'dskd[plot]'")


def draw(path: Path, recording: Recording, history: Iterable[HistoryEntry]) -> None:
    """Draws all samples of `recording` (at least one). Raises UsageError when `path` cannot be written."""
    times = [_seconds(point) for points in recording.points.values() for point in points]
    start, end = min(times), max(times)
    figure = _figure(recording, served_spans(history, start, end))
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _figure(recording: Recording, spans: Sequence[ServedSpan]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    noise, served = figure.subplots(2, sharex=True, height_ratios=(12, 1))
    _draw_noise(noise, recording)
    _draw_fallbacks(noise, spans)
    _draw_served(served, spans)
    _decorate(noise, served, recording.last)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


def _draw_noise(axes: Axes, recording: Recording) -> None:
    thresholds = {mode.mode: mode.threshold for mode in recording.last.modes if mode.HasField("threshold")}
    for mode, points in recording.points.items():
        if points:
            _draw_mode(axes, mode_word(mode), points)
    for mode, threshold in thresholds.items():
        colour = _colour(mode_word(mode))
        label = f"{mode_word(mode)} falls back above {noise_words(threshold, recording.last.measure)}"
        axes.axhline(threshold, color=colour, linestyle="--", linewidth=1.6, label=label)


def _draw_mode(axes: Axes, word: str, points: Sequence[NoisePoint]) -> None:
    times = [_clock(_seconds(point)) for point in points]
    kl = [point.kl for point in points]
    colour = _colour(word)
    heights = [max(value, SMALLEST) if math.isfinite(value) else math.nan for value in kl]
    axes.plot(times, heights, ".", color=colour, alpha=0.3, markersize=5, markeredgewidth=0, label=f"{word} sample")
    axes.plot(times, list(running_mean(heights, RUNNING)), color=colour, linewidth=2, label=f"{word} mean of {RUNNING}")
    broken = [time for time, value in zip(times, kl, strict=True) if not math.isfinite(value)]
    if broken:
        top = [1.0] * len(broken)
        axes.plot(
            broken, top, "x", color=colour, transform=axes.get_xaxis_transform(), clip_on=False, label="not finite"
        )


def running_mean(values: Iterable[float], length: int) -> Iterator[float]:
    """Of the latest `length` values at each, or as many as there are; without those that are NaN."""
    latest: deque[float] = deque(maxlen=length)
    for value in values:
        if not math.isnan(value):
            latest.append(value)
        yield sum(latest) / len(latest) if latest else math.nan


def _draw_fallbacks(axes: Axes, spans: Iterable[ServedSpan]) -> None:
    label = "fallback"
    for span in spans:
        if span.is_fallback:
            axes.axvspan(
                _clock(span.start), _clock(span.end), color=FALLBACK_COLOUR, alpha=0.1, linewidth=0, label=label
            )
            label = ""


def _draw_served(axes: Axes, spans: Sequence[ServedSpan]) -> None:
    whole = spans[-1].end - spans[0].start if spans else 0.0
    with_generation = len({span.generation for span in spans}) > 1
    for span in spans:
        word = mode_word(span.mode)
        name = f"{word}, gen. {span.generation}" if with_generation else word
        axes.axvspan(_clock(span.start), _clock(span.end), color=_colour(word), alpha=0.75, linewidth=0)
        if span.end - span.start > LABEL_SHARE * whole:
            middle = _clock((span.start + span.end) / 2)
            axes.text(middle, 0.5, name, color="white", weight="bold", size="small", ha="center", va="center")


def _decorate(noise: Axes, served: Axes, last: GetNoiseResponse) -> None:
    from matplotlib.dates import ConciseDateFormatter

    noise.set_yscale("log")
    reference = mode_word(last.reference)
    ratio = f"noise power / signal power, against {reference}"
    noise.set_ylabel(ratio if is_ratio(last.measure) else f"KL({reference} || mode), nats per token")
    noise.set_title(f"{last.model}: noise of live answers, and what served")
    noise.grid(visible=True, which="major", alpha=0.3)
    noise.margins(x=0)
    served.set_ylabel("served", rotation=0, ha="right", va="center")
    served.set_yticks([])
    served.set_ylim(0, 1)
    served.margins(x=0)
    served.xaxis_date()
    locator = served.xaxis.get_major_locator()
    served.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]


def _colour(word: str) -> str:
    return COLOURS.get(word, OTHER_COLOUR)


def _clock(seconds: float) -> float:
    """Days since 1970-01-01 by the clock of this machine, as matplotlib counts them (matplotlib.dates)."""
    return (datetime.fromtimestamp(seconds) - datetime(1970, 1, 1)) / timedelta(days=1)


def _seconds(point: NoisePoint) -> float:
    return point.time.seconds + point.time.nanos / 1e9
