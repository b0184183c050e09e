"""From a GGUF file to an answer whose precision changes while it streams: `make demo`; `--serve` leaves it running."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Table
from rich.text import Text

from dskapi.v1.control_pb2 import SwitchPrecisionRequest, SwitchPrecisionResponse
from dskapi.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, GenerateResponse, Sampling
from dskctl.address import ADDRESS_VARIABLE, LONGEST_UNIX_PATH
from dskctl.answer import MarkedAnswer
from dskctl.daemon import Daemon, open_channel, relayed
from dskctl.errors import explained
from dskctl.printer import PlainConsole
from dskctl.tables import table
from dskctl.words import MODES, mode_word
from dskquant.errors import StoreError
from dskquant.store import StoreManifest, file_sha256

FOLDER = Path(".demo")
STORE = FOLDER / "store"
CONFIG = FOLDER / "dskd.toml"
STATE = FOLDER / "state"
LOG = FOLDER / "dskd.log"
SOCKET_NAME = "dskd.sock"
LOG_TAIL_LINES = 20

MODEL = "smollm2"
QUESTION = "Tell a long story, with every detail, of a fox who learns to read and then travels through the forest."
SAMPLING = Sampling(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=1)
MAX_TOKENS = 2_000
FIRST_MODE = "int4"
NEXT_MODES = ("int8", "fp32", "int4")
STRETCH_TOKENS = 40
"""Tokens a mode makes, at least, before the next switch is asked for."""

START_LIMIT_S = 300
STOP_LIMIT_S = 60

console = PlainConsole()


class DemoError(Exception):
    """A step did not do what it should; the message is the whole story."""


def main() -> int:
    """Runs the demo; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the model to convert and serve")
    parser.add_argument("--serve", action="store_true", help="leave the daemon running until Ctrl-C")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    FOLDER.mkdir(exist_ok=True)
    try:
        with socket_path() as path:
            if somebody_answers(path):
                print(f"demo: a daemon already answers on {path}; stop it first (make serve?)", file=sys.stderr)
                return 1
            LOG.unlink(missing_ok=True)
            run(args.gguf, f"unix://{path}", args.serve)
    except DemoError as error:
        return failed([str(error)])
    except grpc.RpcError as error:
        return failed(explained(error, "the socket of the demo")[1])
    except KeyboardInterrupt:
        return 130
    return 0


def run(gguf: Path, address: str, serve: bool) -> None:
    heading("Convert the model")
    convert(gguf)
    heading("Start the daemon")
    write_config(address)
    if not serve:
        shutil.rmtree(STATE, ignore_errors=True)  # the demo starts in its first mode, whatever it ended in before
    with running_daemon() as process, open_channel(address) as channel:
        wait_until_serving(process, channel)
        if serve:
            wait_for_ctrl_c(process, address)
        else:
            heading("An answer, switched while it streams")
            show_switched_answer(Daemon.over(channel))


def failed(lines: list[str]) -> int:
    """Says why, with the end of the daemon's log if it got so far."""
    for line in lines:
        print(f"demo: {line}", file=sys.stderr)
    if LOG.exists():
        tail = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        print(f"demo: the end of {LOG}:", *tail, sep="\n", file=sys.stderr)
    return 1


def heading(text: str) -> None:
    console.print(Text(f"\n== {text}", style="bold"))


def announced(*command: str) -> list[str]:
    """The command to run, shown. Raises DemoError when it is not installed."""
    program, *arguments = command
    line = [path_of(program), *arguments]
    console.print(f"$ {shlex.join(line)}", soft_wrap=True)
    return line


def path_of(program: str) -> str:
    """Where a program is, from here if it is below: the reader's PATH need not be ours. Raises DemoError."""
    found = shutil.which(program)
    if found is None:
        raise DemoError(f"no command {program!r}; install it from the source directory with: pip install '.[daemon]'")
    path = Path(found)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else found


def convert(gguf: Path) -> None:
    """Makes the model store unless a whole one is there."""
    if is_whole(STORE):
        console.print(f"{STORE} is there and whole")
        return
    shutil.rmtree(STORE, ignore_errors=True)
    command = announced("dskquant", "convert", str(gguf), "-o", str(STORE))
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603  (our own command)
        raise DemoError("the conversion failed")


def is_whole(store: Path) -> bool:
    """Every file that the manifest lists is there with its digest."""
    try:
        digests = StoreManifest.read(store).sha256
        return all(file_sha256(store / name) == digest for name, digest in digests.items())
    except (StoreError, OSError):
        return False


@contextmanager
def socket_path() -> Iterator[Path]:
    """Beside the rest, or in a temporary folder where that path is too long for a socket."""
    beside = (FOLDER / SOCKET_NAME).absolute()
    if len(bytes(beside)) <= LONGEST_UNIX_PATH:
        yield beside
        return
    with tempfile.TemporaryDirectory(prefix="dskd-") as folder:
        yield Path(folder) / SOCKET_NAME


def somebody_answers(path: Path) -> bool:
    """A daemon listens on that socket; the file alone may be left over."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def write_config(address: str) -> None:
    """One model, one socket; the paths start at the folder of the file. A JSON string is a TOML string too."""
    lines = (
        "[server]",
        f"listen = [{json.dumps(address)}]",
        f"state_dir = {json.dumps(STATE.name)}",
        "",
        f"[models.{MODEL}]",
        f"path = {json.dumps(STORE.name)}",
        'resident = ["int4", "int8"]',
        f'default_mode = "{FIRST_MODE}"',
        'kv_cache_bytes = "256MiB"',
        "",
    )
    CONFIG.write_text("\n".join(lines), encoding="utf-8")


@contextmanager
def running_daemon() -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that has to stop cleanly at the end. In a session of its own, so that Ctrl-C reaches this program alone,
    which then stops it in order."""
    command = announced("dskd", "serve", "--config", str(CONFIG))
    with LOG.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and the clean end that has to follow. Raises DemoError when it does not."""
    if process.poll() is None:
        heading("Stop the daemon")
        process.terminate()
    try:
        code = process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise DemoError(f"the daemon did not stop within {STOP_LIMIT_S} s") from None
    if code != 0:
        raise DemoError(f"the daemon ended with exit code {code}")
    console.print("stopped with exit code 0")


def wait_until_serving(process: subprocess.Popen[bytes], channel: grpc.Channel) -> None:
    """Listens to the daemon's health until it serves. Raises DemoError when it ends or takes too long."""
    health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
    statuses = health.Watch(health_pb2.HealthCheckRequest(), timeout=START_LIMIT_S, wait_for_ready=True)
    threading.Thread(target=lambda: (process.wait(), statuses.cancel()), daemon=True).start()
    reason = "it ended its answer"
    try:
        for response in relayed(lambda: statuses):
            if response.status == health_pb2.HealthCheckResponse.SERVING and process.poll() is None:
                console.print("serving")
                return
    except grpc.RpcError as error:
        reason = error.code().name
    finally:
        statuses.cancel()
    raise DemoError(f"the daemon does not serve ({reason if process.poll() is None else 'it ended'})")


def wait_for_ctrl_c(process: subprocess.Popen[bytes], address: str) -> None:
    """Raises DemoError when the daemon ends by itself."""
    heading("Talk to it from another terminal (Ctrl-C here stops it)")
    dskctl = path_of("dskctl")
    console.print(f"export {ADDRESS_VARIABLE}={shlex.quote(address)}", soft_wrap=True)
    for command in ("status", "chat", "switch int8", "history", "watch"):
        console.print(f"{dskctl} {command}", soft_wrap=True)
    with own_ctrl_c():
        try:
            process.wait()
        except KeyboardInterrupt:
            return
    raise DemoError("the daemon ended by itself")


@contextmanager
def own_ctrl_c() -> Iterator[None]:
    """Ctrl-C reaches this program alone, and not `make`, which would call it an error: it takes the terminal in a
    process group of its own. Ctrl-Z, which would stop this program behind the back of the shell, does nothing."""
    if not is_in_foreground():
        yield
        return
    for number in (signal.SIGTTOU, signal.SIGTSTP):  # the first stops who takes a terminal from the background
        signal.signal(number, signal.SIG_IGN)
    terminal, before = sys.stdin.fileno(), os.getpgrp()
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(terminal, before)


def is_in_foreground() -> bool:
    """Some program, say `make`, started this one in its own process group and holds the terminal."""
    if not sys.stdin.isatty() or os.getpgrp() == os.getpid():
        return False
    return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()


class SwitchPlan:
    """Asks for the next mode, from a second thread, whenever the one at hand has made a stretch of the answer."""

    def __init__(self, daemon: Daemon, thread: ThreadPoolExecutor) -> None:
        self._daemon = daemon
        self._thread = thread
        self._mode: str | None = FIRST_MODE
        self._coming = iter(NEXT_MODES)
        self._tokens = 0
        self._pending: Future[SwitchPrecisionResponse] | None = None
        self.reports: list[SwitchPrecisionResponse] = []

    @property
    def is_done(self) -> bool:
        return self._mode is None

    def follow(self, response: GenerateResponse) -> None:
        """Counts the tokens of a response and goes on when it is time. Raises what a switch raised."""
        self._tokens += sum(mode_word(token.precision) == self._mode for token in response.tokens)
        if self._pending is not None and self._pending.done():
            self.reports.append(self._pending.result())
            self._pending = None
        if self._pending is None and self._tokens >= STRETCH_TOKENS:
            self._ask_for(next(self._coming, None))

    def _ask_for(self, mode: str | None) -> None:
        self._mode, self._tokens = mode, 0
        if mode is not None:
            request = SwitchPrecisionRequest(model=MODEL, mode=MODES[mode], wait=True)
            self._pending = self._thread.submit(self._daemon.switch_precision, request)


def show_switched_answer(daemon: Daemon) -> None:
    """Streams until every mode of the plan has made its stretch. Raises DemoError when the answer ends before."""
    question = ChatMessage(role="user", content=QUESTION)
    request = GenerateRequest(
        model=MODEL, chat=Chat(messages=[question]), sampling=SAMPLING, max_new_tokens=MAX_TOKENS, ignore_eos=True
    )
    view = MarkedAnswer(console)
    with ThreadPoolExecutor(1) as thread:
        plan = SwitchPlan(daemon, thread)
        with closing(daemon.generate(request)) as responses, view:
            for response in responses:
                view.write(response)
                plan.follow(response)
                if plan.is_done:
                    break
    if not plan.is_done:
        raise DemoError("the answer ended before all switches were made")
    console.print("", switches_table(plan.reports), "", tokens_table(view.tokens_by_mode), sep="\n")


def switches_table(reports: list[SwitchPrecisionResponse]) -> Table:
    """One row for each switch, in order."""
    numbers = ("FLIP µs", "PREPARED IN ms")
    made = table("FROM", "TO", "RESIDENT", *numbers, right=numbers)
    for report in reports:
        made.add_row(
            mode_word(report.from_mode),
            mode_word(report.to_mode),
            "yes" if report.resident else "no",
            f"{report.flip_us:.1f}",
            f"{report.prepare_ms:,.0f}",
        )
    return made


def tokens_table(counts: Counter[str]) -> Table:
    """How many tokens of the answer each mode made."""
    made = table("MODE", "TOKENS", right=("TOKENS",))
    for mode, count in counts.items():
        made.add_row(mode, str(count))
    return made


if __name__ == "__main__":
    sys.exit(main())
