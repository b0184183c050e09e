"""Tells systemd how the service is doing; see sd_notify(3)."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """Sends for example "READY=1" to the service manager, where there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # abstract namespace
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(state.encode(), address)
