"""Events: what happens in the daemon, as it happens, to whoever listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SUBSCRIBER_BACKLOG = 1_000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; `fields` are JSON values."""

    sequence: int
    time: float  # seconds since the epoch
    kind: str
    model: str
    message: str
    fields: dict[str, Any]


class Subscription:
    """Events for one listener. One that does not keep up loses the oldest, and is told how many."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue(SUBSCRIBER_BACKLOG)
        self.lost = 0

    def offer(self, event: Event) -> None:
        if self._queue.full():
            self._queue.get_nowait()
            self.lost += 1
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            yield await self._queue.get()


class EventBus:
    """Fans events out to the subscriptions. Lives on the asyncio thread."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._last_sequence = 0

    def publish(self, kind: str, model: str, message: str, **fields: Any) -> None:
        """Tells every subscriber; `kind` is like "switch.committed"."""
        self._last_sequence += 1
        event = Event(self._last_sequence, time.time(), kind, model, message, fields)
        for subscription in self._subscriptions:
            subscription.offer(event)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """A subscription that gets every event published while the context is open."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
