"""`python -m dskquant`, and the command `dskquant`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command; where the client alone is installed, says what is missing instead."""
    try:
        from dskquant.cli import main as run
    except ModuleNotFoundError as error:
        hint = "install the rest from the source directory with: pip install '.[daemon]'"
        print(f"dskquant: no module {error.name!r}; {hint}", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
