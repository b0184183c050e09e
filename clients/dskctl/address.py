"""Where the daemon is: `unix:///path` or `host:port`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dskctl.exits import UsageError

ADDRESS_VARIABLE = "DSKD_ADDRESS"
SYSTEM_SOCKET = Path("/run/dskd/dskd.sock")
USER_SOCKET = "dskd.sock"  # in $XDG_RUNTIME_DIR
UNIX = "unix://"
LONGEST_UNIX_PATH = 107
"""Bytes, of `sun_path` in unix(7) without its final zero."""

_HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def default_address() -> str:
    """$DSKD_ADDRESS; else the socket of the system's daemon if there is one, else that of the user's own."""
    if address := os.environ.get(ADDRESS_VARIABLE):
        return address
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if SYSTEM_SOCKET.exists() or not runtime:
        return f"{UNIX}{SYSTEM_SOCKET}"
    return f"{UNIX}{Path(runtime) / USER_SOCKET}"


def checked_address(address: str) -> str:
    """`address` if it can be one. Raises UsageError."""
    if address.startswith(UNIX):
        return _checked_unix(address)
    if address.startswith("/"):
        raise UsageError(f"address {address!r}: for a socket write {UNIX}{address}")
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"address {address!r} is neither unix:///path nor host:port")
    return address


def _checked_unix(address: str) -> str:
    path = address.removeprefix(UNIX)
    if not path.startswith("/"):
        raise UsageError(f"address {address!r}: the path of a socket must be absolute (unix:///path)")
    if len(os.fsencode(path)) > LONGEST_UNIX_PATH:
        raise UsageError(f"address {address!r}: the path of a socket has {LONGEST_UNIX_PATH} bytes at most")
    return address
