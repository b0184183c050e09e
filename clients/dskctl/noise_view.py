"""The noise of a model for people: a table, a live view with charts, and bare lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from dskapi.v1.control_pb2 import GetNoiseResponse, ModeNoise
from dskctl.answer import MODE_STYLES
from dskctl.noise_samples import Recording
from dskctl.sparkline import LogScale, bars, row_of
from dskctl.tables import dense_table
from dskctl.words import NOTHING, fallback_word, is_ratio, mode_word, nats, noise_words, printable, share

COLUMNS = ("MODE", "STATE", "MEAN KL", "95 % INTERVAL", "LIMIT", "EVIDENCE", "TRIPS", "CAUSE")
NUMBERS = ("MEAN KL", "LIMIT", "EVIDENCE", "TRIPS")
DETAILS = ("MODE", "P50", "P90", "P99", "AGREE", "SAMPLES", "EVER", "NOT FINITE", "ENTROPY", "MARGIN", "N-GRAMS")
CHART_ROWS = 3
LABEL_COLUMNS = 18
NO_SAMPLES = "no token was scored yet"

Words = Callable[[float], str]


def as_text(response: GetNoiseResponse) -> RenderableType:
    """What serves and why; for each mode what decides on a fallback, then its samples and how sure it is of itself."""
    if not response.modes:
        return Group(headline(response), NO_SAMPLES)
    mean = "MEAN SQNR" if is_ratio(response.measure) else "MEAN KL"
    columns, numbers = (tuple(name.replace("MEAN KL", mean) for name in names) for names in (COLUMNS, NUMBERS))
    words = partial(noise_words, measure=response.measure)
    decisions = dense_table(columns, [_decision(mode, words) for mode in response.modes], right=numbers, rigid=columns)
    details = dense_table(DETAILS, [_details(mode, words) for mode in response.modes], right=DETAILS[1:])
    return Group(headline(response), "", decisions, "", details)


def headline(response: GetNoiseResponse) -> str:
    """The model, what it is compared with, and whatever keeps it from the mode it was asked to serve in."""
    parts = [response.model, f"generation {response.generation}"]
    if response.reference:
        measure = "signal to noise" if is_ratio(response.measure) else "KL in nats per token"
        parts.append(f"{measure} to {mode_word(response.reference)}")
    else:
        parts.append("no reference in memory")
    if response.fallback:
        parts.append(f"fallback: {mode_word(response.fallback)} serves")
    if response.pin:
        parts.append(f"pinned to {mode_word(response.pin)}")
    if response.lowered:
        parts.append("lowered by load")
    if response.escalated_requests:
        parts.append(f"{response.escalated_requests} requests escalated")
    return " · ".join(parts)


def _decision(mode: ModeNoise, words: Words) -> list[str]:
    return [
        mode_word(mode.mode),
        fallback_word(mode.state),
        words(mode.mean_kl),
        interval_words(mode, words),
        words(mode.threshold) if mode.HasField("threshold") else NOTHING,
        evidence_words(mode),
        str(mode.trips or NOTHING),
        printable(mode.cause) or NOTHING,
    ]


def _details(mode: ModeNoise, words: Words) -> list[str]:
    return [
        mode_word(mode.mode),
        *map(words, (mode.p50, mode.p90, mode.p99)),
        share(mode.agreement),
        str(mode.samples),
        f"{mode.total_samples:,}",
        str(mode.non_finite or NOTHING),
        NOTHING if math.isnan(mode.entropy) else f"{mode.entropy:.2f}",
        NOTHING if math.isnan(mode.margin) else f"{mode.margin:.2f}",
        share(mode.unique_ngrams),
    ]


def interval_words(mode: ModeNoise, words: Words = nats) -> str:
    """ "0.18–0.21"."""
    known = mode.HasField("low") and mode.HasField("high")
    return f"{words(mode.low)}–{words(mode.high)}" if known else NOTHING


def evidence_words(mode: ModeNoise) -> str:
    """How far it is on the way to a fallback."""
    return f"{max(0.0, mode.evidence) / mode.evidence_needed:.0%}" if mode.evidence_needed else NOTHING


def as_lines(response: GetNoiseResponse) -> str:
    """A line for each mode, for an output that only grows."""
    clock = time.strftime("%H:%M:%S")
    if not response.modes:
        return f"{clock}  {response.model}  {NO_SAMPLES}"
    words = partial(noise_words, measure=response.measure)
    name = "SQNR" if is_ratio(response.measure) else "KL"
    return "\n".join(f"{clock}  {response.model}  {_line(mode, name, words)}" for mode in response.modes)


def _line(mode: ModeNoise, name: str, words: Words) -> str:
    limit = f", limit {words(mode.threshold)}" if mode.HasField("threshold") else ""
    return (
        f"{mode_word(mode.mode)} {fallback_word(mode.state)}  "
        f"{name} {words(mode.mean_kl)} ({interval_words(mode, words)}){limit}  "
        f"agree {share(mode.agreement)}  samples {mode.samples}  evidence {evidence_words(mode)}"
    )


@dataclass(frozen=True, slots=True)
class LiveView:
    """The table, and below it a chart of the latest samples of each mode."""

    response: GetNoiseResponse
    recording: Recording

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield as_text(self.response)
        width = max(1, options.max_width - LABEL_COLUMNS)
        for mode in self.response.modes:
            latest = [point.kl for point in self.recording.points[mode.mode][-width:]]
            if latest:
                yield ""
                yield chart(mode, latest, width, self.response.measure)


def chart(mode: ModeNoise, kl: Sequence[float], width: int, measure: int = 0) -> Text:
    """A bar for each of `kl` (at most `width`), the latest at the right, with the limit drawn across."""
    limit = mode.threshold if mode.HasField("threshold") else None
    scale = LogScale.of([*kl, *([] if limit is None else [limit])])
    lines = bars(kl, scale, CHART_ROWS)
    labels = {}
    if limit is not None:
        marked = row_of(limit, scale, CHART_ROWS)
        lines[marked] = lines[marked].rjust(width).replace(" ", "┄")
        labels[marked] = f"limit {noise_words(limit, measure)}"
    what = f"{mode_word(mode.mode)}: {'noise / signal' if is_ratio(measure) else 'KL'} of the latest {len(kl)} samples"
    name = f"{what}, log scale from {scale.low:g} to {scale.high:g}"
    made = Text(name, style="bold", no_wrap=True)
    for row, line in enumerate(lines):
        made.append(f"\n{line.rjust(width)}", style=MODE_STYLES.get(mode_word(mode.mode), ""))
        made.append(f" {labels.get(row, '')}", style="dim")
    return made
