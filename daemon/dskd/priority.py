"""Threads that yield to those that serve."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import structlog

NICENESS = 10
PATIENCE_S = 20.0

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()

T = TypeVar("T")


def lower_priority() -> None:
    """Makes the calling thread yield to others. Linux has a niceness for each thread: setpriority(2)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def at_once(work: Callable[[], T]) -> T:
    """Does `work` in the calling thread."""
    return work()


def when_idle(work: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Does `work` in a thread of its own that only gets a core which nobody else wants: SCHED_IDLE, sched(7).

    A nice thread keeps its core for some milliseconds when a thread that serves wakes up, and every layer of a step
    waits for the last of its threads: a step beside one took half as long again, beside an idle one a tenth. For long
    work of the engine alone; whoever waits for a lock that such a thread holds waits long.

    Where others want all cores all the time it would never end: after `patience_s` seconds it is a nice thread. Where
    the kernel would not allow that, it is one from the start.
    """
    with ThreadPoolExecutor(1, "when-idle", lower_priority) as thread:
        thread_id = thread.submit(threading.get_native_id).result()
        if _may_leave_idle():
            _set_scheduler(thread_id, os.SCHED_IDLE)
        done = thread.submit(work)
        if not wait([done], patience_s).done and os.sched_getscheduler(thread_id) == os.SCHED_IDLE:
            _set_scheduler(thread_id, os.SCHED_OTHER)
        return done.result()


@functools.cache
def _may_leave_idle() -> bool:
    """Whether a thread that is nice and SCHED_IDLE may become merely nice: RLIMIT_NICE forbids it to most users."""
    with ThreadPoolExecutor(1, "may-leave-idle", lower_priority) as thread:
        thread_id = thread.submit(threading.get_native_id).result()
        _set_scheduler(thread_id, os.SCHED_IDLE)
        try:
            _set_scheduler(thread_id, os.SCHED_OTHER)
        except PermissionError:
            log.info(
                "builds are nice but do not wait for idle cores, and open answers notice them more",
                remedy="allow niceness 10: LimitNICE=+10 in systemd, CAP_SYS_NICE in a container",
            )
            return False
        return True


def _set_scheduler(thread_id: int, policy: int) -> None:
    os.sched_setscheduler(thread_id, policy, os.sched_param(0))
