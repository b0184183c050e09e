"""Modes that are kept in memory as long as the monitor needs them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dskd.monitor.types import MonitoredModel, Served
from dskquant.modes import PrecisionMode


@dataclass(frozen=True, slots=True)
class Failure:
    """A mode could not be brought into memory."""

    mode: PrecisionMode
    error: BaseException


class ReadyModes:
    """Brings modes into memory in the background. Each `make_ready` is answered by exactly one `let_go`."""

    def __init__(self, target: MonitoredModel, wake: Callable[[], None]) -> None:
        """`wake` is called when one has come into memory, or cannot."""
        self._target = target
        self._wake = wake
        self._tasks: dict[PrecisionMode, asyncio.Task[None]] = {}
        self._retry_at: dict[PrecisionMode, float] = {}
        self._generation: int | None = None

    def want(self, modes: Collection[PrecisionMode], served: Served, now: float, retry_s: float) -> list[Failure]:
        """From now on exactly `modes` are wanted, of the generation that is served.

        Returns what has failed since the last call; it is tried again in `retry_s` seconds.
        """
        failures = self._take_failures()
        self._follow(served)
        self._retry_at.update((failure.mode, now + retry_s) for failure in failures)
        for mode in self._tasks.keys() - set(modes):
            self._drop(mode)
        self._retry_at = {mode: at for mode, at in self._retry_at.items() if mode in modes}
        for mode in modes:
            if mode not in self._tasks and now >= self._retry_at.get(mode, -math.inf):
                self._begin(mode)
        return [failure for failure in failures if failure.mode in modes]

    def close(self) -> None:
        """Wants none."""
        for mode in list(self._tasks):
            self._drop(mode)

    def _follow(self, served: Served) -> None:
        """What was made ready for an old generation, and the new one does not have, is made ready anew."""
        if served.generation != self._generation:
            self._generation = served.generation
            for mode in self._tasks.keys() - served.resident:
                self._drop(mode)

    def _begin(self, mode: PrecisionMode) -> None:
        task = asyncio.create_task(self._target.make_ready(mode), name=f"make {mode.value} ready")
        task.add_done_callback(lambda _: self._wake())
        self._tasks[mode] = task

    def _take_failures(self) -> list[Failure]:
        failures = []
        for mode, task in list(self._tasks.items()):
            error = _error_of(task)
            if error is not None:
                self._drop(mode)
                failures.append(Failure(mode, error))
        return failures

    def _drop(self, mode: PrecisionMode) -> None:
        task = self._tasks.pop(mode)
        self._target.let_go(mode)
        task.cancel()
        task.add_done_callback(_error_of)  # what it still has to say, nobody needs


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    if not task.done():
        return None
    return asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
