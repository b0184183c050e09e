"""The changes of all models: in memory, and in a file of JSON lines that outlives the daemon."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import structlog

from dskd import durable, typed_json
from dskd.manager.types import HistoryEntry

KEPT_ENTRIES = 10_000
LONGEST_REASON = 4_000
"""Characters; what is wrong with a file may quote megabytes of it."""

MOST_BYTES = 16 << 20
"""Of the file; when it has grown beyond, the newest entries that fill half of that are left."""

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


class History:
    """An append-only list of changes that forgets the oldest. Without `path` it is kept in memory alone.

    Where the file cannot be read or written, that is logged and the history goes on in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: deque[HistoryEntry] = deque(maxlen=KEPT_ENTRIES)
        if path is not None:
            self._read(path)
        self._last_sequence = max((entry.sequence for entry in self._entries), default=0)

    def append(self, entry: HistoryEntry) -> HistoryEntry:
        """Numbers and keeps `entry`, a long reason cut, on disk when it returns; returns it as it is kept."""
        self._last_sequence += 1
        numbered = replace(entry, sequence=self._last_sequence, reason=_cut(_encodable(entry.reason)))
        self._entries.append(numbered)
        if self._path is not None:
            self._write(self._path, numbered)
        return numbered

    def newest(self, model: str | None, limit: int) -> list[HistoryEntry]:
        """At most `limit` entries (of `model` alone unless None), newest first."""
        wanted = (entry for entry in reversed(self._entries) if model is None or entry.model == model)
        return [entry for entry, _ in zip(wanted, range(limit), strict=False)]

    def contains(self, id: str) -> bool:  # noqa: A002
        """Whether the entry with this id is here."""
        return any(entry.id == id for entry in reversed(self._entries))

    def _write(self, path: Path, entry: HistoryEntry) -> None:
        try:
            durable.append_line(path, _line(entry))
        except OSError as error:
            log.error("history entry is kept in memory alone", path=str(path), id=entry.id, reason=str(error))
        else:
            _keep_short(path)

    def _read(self, path: Path) -> None:
        try:
            whole, _, torn = path.read_bytes().rpartition(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            log.error("history cannot be read", path=str(path), reason=str(error))
            return
        if torn:  # the next append cuts it off
            log.error("last line of the history dropped: a crash cut it short", path=str(path), bytes=len(torn))
        lines = whole.split(b"\n") if whole else []
        self._entries.extend(_read_lines(path, lines))
        if len(lines) > 2 * KEPT_ENTRIES or len(whole) > MOST_BYTES:
            _shorten(path, lines)


def _encodable(text: str) -> str:
    """`text` as UTF-8 can have it: half of a surrogate pair, which JSON and file names may hold, is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(reason: str) -> str:
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."


def _line(entry: HistoryEntry) -> bytes:
    return json.dumps(typed_json.dump(entry)).encode()


def _keep_short(path: Path) -> None:
    try:
        if path.stat().st_size <= MOST_BYTES:
            return
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        log.error("history cannot be shortened", path=str(path), reason=str(error))
    else:
        _shorten(path, lines)


def _shorten(path: Path, lines: list[bytes]) -> None:
    sizes = itertools.accumulate(len(line) + 1 for line in reversed(lines))
    kept = sum(1 for size in itertools.takewhile(lambda size: size <= MOST_BYTES // 2, sizes))
    newest = lines[len(lines) - min(kept, KEPT_ENTRIES) :]
    try:
        durable.replace_file(path, b"".join(line + b"\n" for line in newest))
    except OSError as error:
        log.error("history cannot be shortened", path=str(path), reason=str(error))


def _read_lines(path: Path, lines: list[bytes]) -> Iterator[HistoryEntry]:
    """The entries in the newest of `lines`, without those that are damaged."""
    first = max(0, len(lines) - KEPT_ENTRIES)
    for number, line in enumerate(lines[first:], first + 1):
        entry = _read_or_tell(path, number, line)
        if entry is not None:
            yield entry


def _read_or_tell(path: Path, number: int, line: bytes) -> HistoryEntry | None:
    try:
        return typed_json.load(HistoryEntry, typed_json.parse(line))
    except ValueError as error:
        log.error("damaged line of the history left out", path=str(path), line=number, reason=str(error))
        return None
