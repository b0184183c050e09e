"""What Ctrl-C does to the program. Imports nothing that takes time."""

from __future__ import annotations

import os
import signal

from dskctl.exits import ExitCode


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process: nothing is open that would have to be closed in order."""
    signal.signal(signal.SIGINT, _leave)


def unwind_once() -> None:
    """The next Ctrl-C is a KeyboardInterrupt. One more ends the process: what it interrupts while the first is being
    handled may hold the locks of gRPC, and closing the channel would hang."""
    signal.signal(signal.SIGINT, _unwind)


def handled() -> None:
    """The program goes on after a Ctrl-C: the next one is the first again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        unwind_once()


def _unwind(*_: object) -> None:
    leave_at_once()
    raise KeyboardInterrupt


def _leave(*_: object) -> None:
    os._exit(ExitCode.INTERRUPTED)
