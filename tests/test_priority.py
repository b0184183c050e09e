"""Threads that yield to those that serve."""

from __future__ import annotations

import os

import pytest

from dskd import priority
from dskd.priority import NICENESS, when_idle

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="RLIMIT_NICE may forbid it")


@as_root
def test_work_for_idle_cores_is_done_in_that_class_alone() -> None:
    before = os.sched_getscheduler(0)
    assert when_idle(lambda: os.sched_getscheduler(0)) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before


def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        when_idle(lambda: 1 // 0)


@as_root
def test_work_that_never_gets_a_core_is_nice_in_the_end() -> None:
    def until_it_is_nice() -> int:
        while os.sched_getscheduler(0) == os.SCHED_IDLE:
            pass
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert when_idle(until_it_is_nice, patience_s=0.01) == NICENESS


def test_where_an_idle_thread_must_stay_idle_it_is_nice_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    set_scheduler = os.sched_setscheduler

    def kernel(thread_id: int, policy: int, param: os.sched_param) -> None:
        if policy == os.SCHED_OTHER:
            raise PermissionError(1, "Operation not permitted")
        set_scheduler(thread_id, policy, param)

    monkeypatch.setattr(os, "sched_setscheduler", kernel)
    priority._may_leave_idle.cache_clear()
    try:
        found = when_idle(lambda: (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)))
    finally:
        priority._may_leave_idle.cache_clear()
    assert found == (os.SCHED_OTHER, NICENESS)
