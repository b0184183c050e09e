"""Tells history, listeners and log how the changes of a model ended."""

from __future__ import annotations

import structlog

from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.types import HistoryEntry
from dskquant.modes import PrecisionMode


class Journal:
    """Of one model."""

    def __init__(self, model: str, events: EventBus, history: History) -> None:
        self._model = model
        self._events = events
        self._history = history
        self.log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger().bind(model=model)

    def note(self, entry: HistoryEntry) -> None:
        """Keeps `entry` and tells it."""
        entry = self._history.append(entry)
        facts = {
            "actor": entry.actor,
            "from": _value(entry.from_mode),
            "to": _value(entry.to_mode),
            "from_generation": entry.from_generation,
            "generation": entry.generation,
            "parameter_set": entry.parameter_set,
            "kl": {proof.mode.value: proof.kl_after for proof in entry.proofs},
            "flip_us": entry.flip_us,
            "phases_ms": entry.phases_ms,
        }
        self._events.publish(f"{entry.kind}.{entry.outcome}", self._model, _sentence(entry), **facts)
        self.log.info(f"{entry.kind} {entry.outcome}", reason=entry.reason, **facts)

    def recover(self, entry: HistoryEntry) -> None:
        """Keeps the entry of a change that was committed, unless it was kept before the daemon died."""
        if not self._history.contains(entry.id):
            self._history.append(entry)


def _sentence(entry: HistoryEntry) -> str:
    change = f"{_value(entry.from_mode)} -> {_value(entry.to_mode)}"
    if entry.kind not in ("switch", "fallback"):
        change = f"generation {entry.from_generation} -> {entry.generation or 'none'}"
    return f"{change} {entry.outcome}" + (f": {entry.reason}" if entry.reason else "")


def _value(mode: PrecisionMode | None) -> str:
    return mode.value if mode else ""
