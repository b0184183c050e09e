"""Threads that yield to those that serve."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NICENESS = 10

T = TypeVar("T")


def lower_priority() -> None:
    """Makes the calling thread yield to others. Linux has a niceness for each thread: setpriority(2)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def at_once(work: Callable[[], T]) -> T:
    """Does `work` in the calling thread."""
    return work()


def when_idle(work: Callable[[], T]) -> T:
    """Does `work` in a thread of its own that only gets a core which nobody else wants: SCHED_IDLE, sched(7).

    A nice thread keeps its core for some milliseconds when a thread that serves wakes up, and every layer of a step
    waits for the last of its threads: a step beside one took half as long again, beside an idle one a tenth. For long
    work of the engine alone; whoever waits for a lock that such a thread holds waits long.
    """
    with ThreadPoolExecutor(1, "when-idle", _run_when_idle) as thread:
        return thread.submit(work).result()


def _run_when_idle() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of the calling thread
