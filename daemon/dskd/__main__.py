"""`python -m dskd`, and the command `dskd`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> int:
    """Runs the command; where the client alone is installed, says what is missing instead."""
    if sys.argv[1:2] == ["serve"]:
        _obey_signals_early()
    _open_missing_streams()
    try:
        from dskd.cli import main as run
    except ModuleNotFoundError as error:
        hint = "install the rest from the source directory with: pip install '.[daemon]'"
        print(f"dskd: no module {error.name!r}; {hint}", file=sys.stderr)
        return 1
    return run()


def _obey_signals_early() -> None:
    """Until the daemon itself listens to them: there is nothing to read anew yet, and nothing to end in order."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def _open_missing_streams() -> None:
    """Where the caller closed a standard stream, the next file or socket would take its number, and its output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - its own number is free


if __name__ == "__main__":
    sys.exit(main())
