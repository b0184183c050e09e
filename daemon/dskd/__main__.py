"""`python -m dskd`, and the command `dskd`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command; where the client alone is installed, says what is missing instead."""
    try:
        from dskd.cli import main as run
    except ModuleNotFoundError as error:
        print(f"dskd: no module {error.name!r}; install the rest with: pip install 'dskd[daemon]'", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
