"""The one way into the loop of a model: commands that are applied by its own thread, between two steps or batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition
from typing import Any, TypeVar

T = TypeVar("T")


class CommandQueue:
    """Commands of any thread for one consumer.

    What is asked gets a future, and wakes the consumer; a command whose future was cancelled is skipped. What is told
    gets none, and wakes the consumer once it weighs enough: to wake a thread takes both threads long.
    """

    def __init__(self) -> None:
        self._commands: deque[_Asked | _Told] = deque()
        self._changed = Condition()
        self._weight = 0.0  # of the commands in the queue
        self._enough = 1.0
        self._closed_by: Exception | None = None

    def ask(self, command: Callable[[], T]) -> Future[T]:
        """Queues `command`; the future gets what it returns or raises."""
        return self.ask_later(lambda done: done.set_result(command()))

    def ask_later(self, command: Callable[[Future[T]], None]) -> Future[T]:
        """Queues `command`, which gets the future, to resolve it later; it gets what the command raises."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed_by is None:
                self._add(_Asked(command, future), math.inf)
                return future
        future.set_exception(self._closed_by)
        return future

    def tell(self, command: Callable[[], None], weight: int) -> None:
        """Queues `command`, which must not fail; it is applied in any case. Raises what the queue was closed with."""
        with self._changed:
            if self._closed_by is not None:
                raise self._closed_by
            self._add(_Told(command), weight)

    def wait(self, timeout_s: float | None = None, enough: int = 1) -> None:
        """Blocks the consumer until something is asked or what was told weighs `enough`, or for `timeout_s` seconds."""
        with self._changed:
            self._enough = enough
            self._changed.wait_for(lambda: self._weight >= enough, timeout_s)

    def apply_all(self) -> bool:
        """Applies what is queued by now, in order; whether there was anything. For the consumer alone."""
        with self._changed:
            queued, self._weight = len(self._commands), 0.0
        for _ in range(queued):
            self._commands.popleft().apply()
        return queued > 0

    def close(self, reason: Exception) -> None:
        """Answers what is queued and whatever is asked from now on with `reason`. For the consumer alone."""
        with self._changed:
            self._closed_by = reason
        while self._commands:
            self._commands.popleft().refuse(reason)

    def _add(self, command: _Asked | _Told, weight: float) -> None:
        self._commands.append(command)
        self._weight += weight
        if self._weight >= self._enough:
            self._changed.notify()


@dataclass(frozen=True, slots=True)
class _Asked:
    command: Callable[[Future[Any]], None]
    future: Future[Any]

    def apply(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.command(self.future)
        except Exception as error:
            self.future.set_exception(error)

    def refuse(self, reason: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(reason)


@dataclass(frozen=True, slots=True)
class _Told:
    command: Callable[[], None]

    def apply(self) -> None:
        self.command()

    def refuse(self, reason: Exception) -> None:
        self.command()
