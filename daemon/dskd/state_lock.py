"""One daemon to a state directory: two would overwrite what the other has committed."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from dskd.listen import StartupError

LOCK = ".lock"

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


@dataclass(frozen=True, slots=True)
class StateLock:
    """A state directory that this process has locked."""

    path: Path  # of the lock file
    descriptor: int | None  # None: nothing could be locked, as nothing can be written

    def require(self) -> None:
        """Raises OSError when the directory is gone, or another one has taken its place."""
        if self.descriptor is None:
            return
        if not self.path.exists() or not os.path.samestat(self.path.stat(), os.fstat(self.descriptor)):
            raise FileNotFoundError(f"{self.path.parent} was removed or replaced while the daemon runs: start it again")


def hold(state_dir: Path) -> StateLock:
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
        return StateLock(state_dir / LOCK, None)
    return StateLock(state_dir / LOCK, descriptor)
