"""From a GGUF file to an answer whose precision changes while it streams: `make demo`; `--serve` leaves it running."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from dskapi.v1.control_pb2 import SwitchPrecisionRequest, SwitchPrecisionResponse
from dskapi.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.text import Text
from rich.table import Table

from dskctl.address import LONGEST_UNIX_PATH
from dskctl.answer import MarkedAnswer
from dskctl.daemon import Daemon, open_channel
from dskctl.errors import explained
from dskctl.printer import PlainConsole
from dskctl.tables import table
from dskctl.words import MODES, mode_word
from dskquant.errors import StoreError
from dskquant.store import StoreManifest, file_sha256

FOLDER = Path(".demo").absolute()
STORE = FOLDER / "store"
CONFIG = FOLDER / "dskd.toml"
LOG = FOLDER / "dskd.log"
MODEL = "smollm2"
QUESTION = "Explain to a curious child, step by step and with examples, how plants turn sunlight into food."
SWITCHES = ("int8", "fp32", "int4")
STRETCH_TOKENS = 30
"""So many tokens of each mode, at least, before the next switch is asked for."""
MAX_TOKENS = 1_500
START_LIMIT_S = 300
STOP_LIMIT_S = 60
LOG_TAIL_LINES = 20

console = PlainConsole()


class DemoError(Exception):
    """A step that did not do what it should; the message is the whole story."""


def heading(text: str) -> None:
    console.print(Text(f"\n== {text}", style="bold"))


def convert(gguf: Path) -> None:
    """Makes the model store unless a whole one is there."""
    if is_whole(STORE):
        console.print(f"{STORE} is there and whole")
        return
    command = ["dskquant", "convert", str(gguf), "-o", str(STORE)]
    console.print(f"$ {' '.join(command)}")
    if subprocess.run(command, check=False).returncode != 0:
        raise DemoError("the conversion failed")


def is_whole(store: Path) -> bool:
    """Every file that the manifest lists is there with its digest."""
    try:
        manifest = StoreManifest.read(store)
        return all(file_sha256(store / name) == digest for name, digest in manifest.sha256.items())
    except (StoreError, OSError):
        return False


def write_config() -> str:
    """A configuration with one model and one unix socket; returns the address."""
    socket = FOLDER / "dskd.sock"
    if len(bytes(socket)) > LONGEST_UNIX_PATH:
        socket = Path(tempfile.mkdtemp(prefix="dskd-")) / socket.name
    address = f"unix://{socket}"
    CONFIG.write_text(
        f"[server]\nlisten = [{json.dumps(address)}]\nstate_dir = {json.dumps(str(FOLDER / 'state'))}\n\n"
        f"[models.{MODEL}]\npath = {json.dumps(str(STORE))}\n"
        'resident = ["int4", "int8"]\ndefault_mode = "int4"\nkv_cache_bytes = "256MiB"\n',
        encoding="utf-8",
    )
    return address


@contextmanager
def running_daemon(address: str) -> Iterator[tuple[subprocess.Popen[bytes], grpc.Channel]]:
    """A daemon that serves, stopped with SIGTERM at the end and expected to stop cleanly.

    It has a session of its own: Ctrl-C on the terminal is for this program, which then stops it in order.
    """
    command = ["dskd", "serve", "--config", str(CONFIG)]
    console.print(f"$ {' '.join(command)}   (log: {LOG})")
    with LOG.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        with open_channel(address) as channel:
            wait_until_serving(process, channel)
            yield process, channel
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        raise
    finally:
        process.kill()
        process.wait()
    ...


def wait_until_serving(process: subprocess.Popen[bytes], channel: grpc.Channel) -> None:
    """Listens to the daemon's health until it serves. Raises DemoError when it exits or takes too long."""
    watch = health_pb2_grpc.HealthStub(channel).Watch
    call = watch(health_pb2.HealthCheckRequest(), timeout=START_LIMIT_S, wait_for_ready=True)
    threading.Thread(target=lambda: (process.wait(), call.cancel()), daemon=True).start()
    try:
        for response in call:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return
    except grpc.RpcError as error:
        raise DemoError(f"the daemon does not serve: {error.code().name}") from error
    finally:
        call.cancel()
