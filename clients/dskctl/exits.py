"""The exit codes. Imports nothing of the project."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What the exit status of dskctl says."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    TIMED_OUT = 4
    INTERRUPTED = 130


EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.REFUSED: "refused by the daemon",
    ExitCode.USAGE: "wrong usage",
    ExitCode.UNREACHABLE: "daemon unreachable, or the connection was lost",
    ExitCode.TIMED_OUT: "timed out (--timeout)",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}
"""For the help text: what each code means."""


class UsageError(Exception):
    """The command line asks for something that makes no sense; the message is the whole story."""
