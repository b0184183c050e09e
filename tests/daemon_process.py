"""A daemon as its users run it: a process of its own, reached over a unix socket."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

MODEL = "smollm2"
START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING


class DaemonProcess:
    """One `dskd serve`, and what it needs: configuration, socket, state and log, all in `folder`.

    `start` may be called again after it has ended: the next process finds what the one before has left.
    """

    def __init__(self, folder: Path, models: Mapping[str, Mapping[str, Any]], **server: Any) -> None:
        """`models` are the tables [models.NAME]; `server` are keys of the section [server]."""
        self.folder = folder
        self.socket = folder / "dskd.sock"
        self.state_dir = folder / "state"
        self.target = f"unix:{self.socket}"
        self._log = folder / "dskd.log"
        self._config = folder / "dskd.toml"
        server = {"listen": [f"unix://{self.socket}"], "state_dir": str(self.state_dir), **server}
        tables = {"server": server, "log": {"format": "json"}, **{f"models.{name}": models[name] for name in models}}
        self._config.write_text("\n".join(map(_toml_table, tables, tables.values())), encoding="utf-8")

    def start(self, wait: bool = True) -> DaemonProcess:
        """Starts the process, and waits until a model serves."""
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "dskd", "serve", "--config", str(self._config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            self.wait_until_serving()
        return self

    def wait_until_serving(self) -> None:
        """Listens to the health service; fails with the log when the daemon ends or takes too long."""
        with grpc.insecure_channel(self.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=START_LIMIT_S, wait_for_ready=True)
            threading.Thread(target=lambda: (self.process.wait(), watch.cancel()), daemon=True).start()
            try:
                if not any(response.status == SERVING for response in watch):
                    pytest.fail("the health service ended its watch")
            except grpc.RpcError as error:
                pytest.fail(f"the daemon does not serve ({error})\n{self._log.read_text()}")
            finally:
                watch.cancel()

    def log(self, event: str) -> list[dict[str, Any]]:
        """The lines of the log with this event."""
        lines = map(_json_line, self._log.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line.get("event") == event]

    @property
    def log_text(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """SIGKILL, and the end."""
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        """The exit code; fails when the process does not end."""
        return self.process.wait(STOP_LIMIT_S)

    def stop(self) -> int:
        """SIGTERM and the exit code."""
        self.terminate()
        return self.wait()


@contextmanager
def daemon_process(models: Mapping[str, Mapping[str, Any]], **server: Any) -> Iterator[DaemonProcess]:
    """A daemon that has not been started yet; whatever runs at the end is killed.

    Its folder is not pytest's: that path may be longer than a socket's may be.
    """
    with tempfile.TemporaryDirectory(prefix="dskd-") as folder:
        daemon = DaemonProcess(Path(folder), models, **server)
        try:
            yield daemon
        finally:
            if hasattr(daemon, "process"):
                daemon.kill()


def _toml_table(name: str, values: Mapping[str, Any]) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's too."""
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])


def _json_line(line: str) -> dict[str, Any]:
    """A line of the log; what others write to standard error is an event without a time."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return {"event": line}


DaemonFactory = Callable[..., DaemonProcess]
