"""`python -m dskctl`, and the command `dskctl`."""

import sys

from dskctl import interrupt


def main() -> int:
    """Runs the command; Ctrl-C never ends it with a traceback, not even while its modules are imported."""
    interrupt.leave_at_once()
    from dskctl.cli import main as run

    interrupt.unwind_once()
    try:
        return run()
    finally:
        interrupt.leave_at_once()


if __name__ == "__main__":
    sys.exit(main())
