"""Threads that yield to those that serve."""

from __future__ import annotations

import os
import threading

NICENESS = 10


def lower_priority() -> None:
    """Makes the calling thread yield to others. Linux has a niceness for each thread: setpriority(2)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
