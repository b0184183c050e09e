"""Which mode a model served with, and when, as its history tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dskapi.v1.control_pb2 import HistoryEntry

COMMITTED = "committed"
FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class ServedSpan:
    """A stretch of time with one mode; in seconds since the epoch."""

    start: float
    end: float
    mode: int  # a PrecisionMode of the protocol
    generation: int
    begun_by: str  # kind of the change that began it; "" where the history does not reach back
    is_fallback: bool  # in place of a mode that was too noisy


def served_spans(history: Iterable[HistoryEntry], start: float, end: float) -> list[ServedSpan]:
    """What served from `start` to `end`, oldest first, by a history in any order."""
    changes = sorted((entry for entry in history if _changes_what_serves(entry)), key=lambda entry: entry.sequence)
    spans = [span for span in _spans(changes, end) if span.end > start and span.start < end]
    return [replace(span, start=max(span.start, start), end=min(span.end, end)) for span in spans]


def _changes_what_serves(entry: HistoryEntry) -> bool:
    return entry.outcome == COMMITTED and bool(entry.to_mode)


def _spans(changes: list[HistoryEntry], end: float) -> Iterator[ServedSpan]:
    """A model is in a fallback from the change that left a mode until the one that returns to it, or any other kind."""
    left = None
    if changes and changes[0].from_mode:
        first = changes[0]
        yield ServedSpan(0.0, _seconds(first), first.from_mode, first.from_generation, "", False)
    for entry, until in zip(changes, [*map(_seconds, changes[1:]), end], strict=False):
        if entry.kind != FALLBACK or entry.to_mode == left:
            left = None
        elif left is None and entry.from_mode != entry.to_mode:
            left = entry.from_mode
        yield ServedSpan(_seconds(entry), until, entry.to_mode, entry.generation, entry.kind, left is not None)


def _seconds(entry: HistoryEntry) -> float:
    return entry.time.seconds + entry.time.nanos / 1e9
