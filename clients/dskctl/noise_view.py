"""The noise of a model for people: a table, a live view with charts, and bare lines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from dskapi.v1.control_pb2 import GetNoiseResponse, ModeNoise
from dskctl.answer import MODE_STYLES
from dskctl.noise_samples import Recording
from dskctl.sparkline import LogScale, bars, row_of
from dskctl.tables import dense_table
from dskctl.words import NOTHING, fallback_word, mode_word, nats, printable, share

COLUMNS = ("MODE", "STATE", "MEAN KL", "95 % INTERVAL", "LIMIT", "EVIDENCE", "TRIPS", "CAUSE")
NUMBERS = ("MEAN KL", "LIMIT", "EVIDENCE", "TRIPS")
DETAILS = ("MODE", "P50", "P90", "P99", "AGREE", "SAMPLES", "EVER", "NOT FINITE", "ENTROPY", "MARGIN", "N-GRAMS")
CHART_ROWS = 3
LABEL_COLUMNS = 18
NO_SAMPLES = "no token was scored yet"


def as_text(response: GetNoiseResponse) -> RenderableType:
    """What serves and why; for each mode what decides on a fallback, then its samples and how sure it is of itself."""
    if not response.modes:
        return Group(headline(response), NO_SAMPLES)
    decisions = dense_table(COLUMNS, map(_decision, response.modes), right=NUMBERS, rigid=COLUMNS)
    details = dense_table(DETAILS, map(_details, response.modes), right=DETAILS[1:])
    return Group(headline(response), "", decisions, "", details)


def headline(response: GetNoiseResponse) -> str:
    """The model, what it is compared with, and whatever keeps it from the mode it was asked to serve in."""
    parts = [response.model, f"generation {response.generation}"]
    if response.reference:
        parts.append(f"KL in nats per token to {mode_word(response.reference)}")
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


def _decision(mode: ModeNoise) -> list[str]:
    return [
        mode_word(mode.mode),
        fallback_word(mode.state),
        nats(mode.mean_kl),
        interval_words(mode),
        nats(mode.threshold) if mode.HasField("threshold") else NOTHING,
        evidence_words(mode),
        str(mode.trips or NOTHING),
        printable(mode.cause) or NOTHING,
    ]


def _details(mode: ModeNoise) -> list[str]:
    return [
        mode_word(mode.mode),
        *map(nats, (mode.p50, mode.p90, mode.p99)),
        share(mode.agreement),
        str(mode.samples),
        f"{mode.total_samples:,}",
        str(mode.non_finite or NOTHING),
        NOTHING if math.isnan(mode.entropy) else f"{mode.entropy:.2f}",
        NOTHING if math.isnan(mode.margin) else f"{mode.margin:.2f}",
        share(mode.unique_ngrams),
    ]


def interval_words(mode: ModeNoise) -> str:
    """ "0.18–0.21"."""
    known = mode.HasField("low") and mode.HasField("high")
    return f"{nats(mode.low)}–{nats(mode.high)}" if known else NOTHING


def evidence_words(mode: ModeNoise) -> str:
    """How far it is on the way to a fallback."""
    return f"{max(0.0, mode.evidence) / mode.evidence_needed:.0%}" if mode.evidence_needed else NOTHING


def as_lines(response: GetNoiseResponse) -> str:
    """A line for each mode, for an output that only grows."""
    clock = time.strftime("%H:%M:%S")
    if not response.modes:
        return f"{clock}  {response.model}  {NO_SAMPLES}"
    return "\n".join(f"{clock}  {response.model}  {_line(mode)}" for mode in response.modes)


def _line(mode: ModeNoise) -> str:
    limit = f", limit {nats(mode.threshold)}" if mode.HasField("threshold") else ""
    return (
        f"{mode_word(mode.mode)} {fallback_word(mode.state)}  KL {nats(mode.mean_kl)} ({interval_words(mode)}){limit}  "
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
                yield chart(mode, latest, width)


def chart(mode: ModeNoise, kl: Sequence[float], width: int) -> Text:
    """A bar for each of `kl` (at most `width`), the latest at the right, with the limit drawn across."""
    limit = mode.threshold if mode.HasField("threshold") else None
    scale = LogScale.of([*kl, *([] if limit is None else [limit])])
    lines = bars(kl, scale, CHART_ROWS)
    labels = {}
    if limit is not None:
        marked = row_of(limit, scale, CHART_ROWS)
        lines[marked] = lines[marked].rjust(width).replace(" ", "┄")
        labels[marked] = f"limit {nats(limit)}"
    name = f"{mode_word(mode.mode)}: KL of the latest {len(kl)} samples, log scale from {scale.low:g} to {scale.high:g}"
    made = Text(name, style="bold", no_wrap=True)
    for row, line in enumerate(lines):
        made.append(f"\n{line.rjust(width)}", style=MODE_STYLES.get(mode_word(mode.mode), ""))
        made.append(f" {labels.get(row, '')}", style="dim")
    return made
