"""One daemon to a state directory: two would overwrite what the other has committed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import structlog

from dskd.listen import StartupError

LOCK = ".lock"

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


def hold(state_dir: Path) -> None:
    """Locks the directory until this process ends, however it ends. Raises StartupError when another daemon has it.

    Where nothing can be written nothing can be overwritten: that is told in the log alone.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartupError(f"another dskd uses [server] state_dir {state_dir}; give each its own") from None
    except OSError as error:
        log.warning("state_dir cannot be used: no switch will be possible", path=str(state_dir), reason=str(error))
