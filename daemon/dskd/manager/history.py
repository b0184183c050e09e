"""The changes of all models, newest last, in memory and bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from dskd.manager.types import HistoryEntry

KEPT_ENTRIES = 10_000


class History:
    """An append-only list of changes that forgets the oldest."""

    def __init__(self) -> None:
        self._entries: deque[HistoryEntry] = deque(maxlen=KEPT_ENTRIES)
        self._last_sequence = 0

    def append(self, entry: HistoryEntry) -> HistoryEntry:
        """Numbers and keeps `entry`; returns the numbered one."""
        self._last_sequence += 1
        numbered = replace(entry, sequence=self._last_sequence)
        self._entries.append(numbered)
        return numbered

    def newest(self, model: str | None, limit: int) -> list[HistoryEntry]:
        """At most `limit` entries (of `model` alone unless None), newest first."""
        wanted = (entry for entry in reversed(self._entries) if model is None or entry.model == model)
        return [entry for entry, _ in zip(wanted, range(limit), strict=False)]
