"""Whether somebody still writes a file: the kernel knows."""

from __future__ import annotations

import fcntl
import signal


def is_being_written(descriptor: int) -> bool:
    """True when the file, opened for reading, is also open for writing somewhere.

    The kernel grants a read lease only on a file that nobody has open for writing (fcntl(2), "Leases"). It grants none
    to users that do not own the file, nor on every filesystem; then the answer is False.
    """
    if not hasattr(fcntl, "F_SETLEASE"):  # not on Linux
        return False
    try:
        # A writer that comes while the lease is held raises SIGIO here, which would end the process; SIGURG does not.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:  # EAGAIN: open for writing
        return True
    except OSError:  # EACCES: of another user; EINVAL: no leases on this filesystem
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
