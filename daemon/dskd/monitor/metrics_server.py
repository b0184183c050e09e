"""Answers scrapes of Prometheus over HTTP, on threads of its own."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server
from prometheus_client.registry import Collector

from dskd.address import Address
from dskd.listen import StartupError


class MetricsServer:
    """Answers from `start` to `stop`."""

    def __init__(self, address: Address, registry: Collector) -> None:
        """`address` is a TCP address; port 0 takes any that is free."""
        self._address = address
        self._registry = registry
        self._running: tuple[WSGIServer, threading.Thread] | None = None

    def start(self) -> Address:
        """Binds the address and answers from now on; returns it with the port that was taken. Raises StartupError."""
        try:
            server, thread = start_http_server(self._address.port, self._address.host, self._registry)
        except OSError as error:
            raise StartupError(f"cannot answer scrapes on {self._address}: {error.strerror or error}") from error
        self._running = server, thread
        return Address(host=self._address.host, port=server.server_port)

    def stop(self) -> None:
        """Closes the port, within half a second. A scrape that is being answered ends by itself."""
        if self._running is not None:
            server, thread = self._running
            self._running = None
            server.shutdown()
            server.server_close()
            thread.join()
