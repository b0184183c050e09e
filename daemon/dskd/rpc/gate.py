"""The way in for requests: closed at shutdown, and only so many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dskd.errors import ResourceExhaustedError, UnavailableError
from dskd.registry import SHUTTING_DOWN

RETRY_AFTER_S = 1.0


class Gate:
    """Counts the requests inside. Belongs to the asyncio thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._closed = False

    def close(self) -> None:
        """From now on nobody comes in; who is inside may finish."""
        self._closed = True

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Held while a request is inside. Raises UnavailableError when closed, ResourceExhaustedError when full."""
        if self._closed:
            raise UnavailableError(SHUTTING_DOWN)
        if self._inside >= self._limit:
            description = f"{self._inside} requests are open, as many as max_concurrent_requests allows"
            raise ResourceExhaustedError("requests", description, RETRY_AFTER_S)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
