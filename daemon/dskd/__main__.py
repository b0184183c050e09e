"""`python -m dskd`, and the command `dskd`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command; where the client alone is installed, says what is missing instead."""
    _open_missing_streams()
    try:
        from dskd.cli import main as run
    except ModuleNotFoundError as error:
        hint = "install the rest from the source directory with: pip install '.[daemon]'"
        print(f"dskd: no module {error.name!r}; {hint}", file=sys.stderr)
        return 1
    return run()


def _open_missing_streams() -> None:
    """Where the caller closed a standard stream, the next file or socket would take its number, and its output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - its own number is free


if __name__ == "__main__":
    sys.exit(main())
