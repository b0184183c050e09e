"""The one way into a step loop: commands that are applied by its own thread, between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition
from typing import Any, TypeVar

T = TypeVar("T")


class CommandQueue:
    """Commands of any thread for one consumer. Each gets a future; a command whose future was cancelled is skipped."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Callable[[Future[Any]], None], Future[Any]]] = deque()
        self._changed = Condition()
        self._closed_by: Exception | None = None

    def ask(self, command: Callable[[], T]) -> Future[T]:
        """Queues `command`; the future gets what it returns or raises."""
        return self.ask_later(lambda done: done.set_result(command()))

    def ask_later(self, command: Callable[[Future[T]], None]) -> Future[T]:
        """Queues `command`, which gets the future, to resolve it later; it gets what the command raises."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed_by is None:
                self._commands.append((command, future))
                self._changed.notify()
                return future
        future.set_exception(self._closed_by)
        return future

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the consumer until there is a command, `timeout_s` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands, timeout_s)

    def apply_all(self) -> bool:
        """Applies what is queued by now, in order; whether there was anything. For the consumer alone."""
        queued = len(self._commands)
        for _ in range(queued):
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                command(future)
            except Exception as error:
                future.set_exception(error)
        return queued > 0

    def close(self, reason: Exception) -> None:
        """Answers what is queued and whatever is asked from now on with `reason`."""
        with self._changed:
            self._closed_by = reason
        while self._commands:
            _, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason)
