"""Addresses the daemon listens on."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

UNIX_PATH_BYTES = 107  # sun_path of unix(7), without its final NUL
FORMS = '"unix:///run/dskd/dskd.sock", "127.0.0.1:7411" or "[::1]:7411"'


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket (`path` set) or a TCP host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def from_toml(cls, value: object, base: Path) -> Address:
        """Reads an address; a relative socket path starts at `base`. Raises ValueError saying what is allowed."""
        if not isinstance(value, str):
            raise ValueError(f"allowed: a string such as {FORMS}")
        if value.startswith("unix:"):
            return cls(path=_socket_path(value.removeprefix("unix:").removeprefix("//"), base))
        host, _, port = value.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not host or (":" in host and not bracketed) or not port.isdecimal() or int(port) > 65_535:
            raise ValueError(f"allowed: {FORMS}")
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def is_loopback(self) -> bool:
        """Only processes of this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: who knows where it resolves to

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _socket_path(text: str, base: Path) -> Path:
    if not text:
        raise ValueError(f"the path of the socket is missing; allowed: {FORMS}")
    path = base / text
    length = len(bytes(path))
    if length > UNIX_PATH_BYTES:
        raise ValueError(f"the path of the socket has {length} bytes; the system allows {UNIX_PATH_BYTES}")
    return path
