"""Binds a gRPC server to the addresses of the configuration."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from dskd.address import Address
from dskd.config import ServerConfig, TlsConfig

DIRECTORY_MODE = 0o750


class StartupError(Exception):
    """The daemon cannot begin to serve."""


def bind(server: grpc.aio.Server, config: ServerConfig) -> tuple[Address, ...]:
    """Binds all addresses; returns them with the ports that were really taken. Raises StartupError."""
    credentials = _credentials(config.tls) if config.tls else None
    return tuple(
        _bind_unix(server, address.path, config.socket_mode)
        if address.path
        else _bind_tcp(server, address, credentials)
        for address in config.listen
    )


def _bind_tcp(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> Address:
    try:
        if credentials:
            port = server.add_secure_port(str(address), credentials)
        else:
            port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        guess = "are [server.tls] certificate and key valid?" if credentials else str(error)
        raise StartupError(f"cannot listen on {address}: {_system_reason(address) or guess}") from error
    return Address(host=address.host, port=port)


def _system_reason(address: Address) -> str | None:
    """gRPC keeps to itself why it cannot bind; doing the same by hand tells, unless it succeeds."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _bind_unix(server: grpc.aio.Server, path: Path, mode: int) -> Address:
    """The lock makes two daemons that start at once take turns; the umask lets nobody in before the mode is set."""
    try:
        path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        with _locked(path.parent), _umask(0o777 & ~mode):
            _remove_stale(path)
            server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        raise StartupError(f"cannot listen on unix://{path}: {error}") from error
    return Address(path=path)


def _remove_stale(path: Path) -> None:
    """Removes the socket of a daemon that is gone. Raises StartupError when somebody still answers on it."""
    if not path.is_symlink() and not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise StartupError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise StartupError(f"another dskd is running: it answers on unix://{path}")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)


def _credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    try:
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
        client_ca = tls.client_ca.read_bytes() if tls.client_ca else None
    except OSError as error:
        raise StartupError(f"TLS files cannot be read: {error}") from error
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)
