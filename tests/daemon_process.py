"""A daemon as its users run it, a process of its own reached over a unix socket, and a client of it."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from dskapi.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from dskapi.v1.common_pb2 import IN_FLIGHT_MIGRATE, InFlight, PrecisionMode

MODEL = "smollm2"
START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


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

    def wait_until_serving(self, model: str = "") -> None:
        """Waits until `model`, or any, serves: listens to the health service; fails with the log when the daemon ends
        or takes too long.
        """
        with grpc.insecure_channel(self.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=model), timeout=START_LIMIT_S, wait_for_ready=True)
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
    return "\n".join([f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items()), ""])


def _toml_value(value: Any) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's too."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml_value(item)}' for key, item in value.items())} }}"
    return json.dumps(value)


def _json_line(line: str) -> dict[str, Any]:
    """A line of the log; what others write to standard error is an event without a time."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return {"event": line}


@dataclass
class Answer:
    """One stream, as far as it was read."""

    text: str = ""
    tokens: list[inference_pb2.GeneratedToken] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)  # of each token, seconds of `time.monotonic`
    last: inference_pb2.GenerateResponse = field(default_factory=inference_pb2.GenerateResponse)

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        self.text += response.text
        self.tokens += response.tokens
        self.arrived += [time.monotonic()] * len(response.tokens)
        self.last = response

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def modes(self) -> list[PrecisionMode]:
        """The modes that made the tokens."""
        return [token.precision for token in self.tokens]


@dataclass
class Client:
    """The services of a daemon. The stubs of grpc know the synchronous channel alone; hence Any."""

    channel: grpc.aio.Channel

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def control(self) -> Any:
        return control_pb2_grpc.ControlStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    async def answer(self, prompt: str = "Once upon a time", new: int = 8, **options: Any) -> Answer:
        """The whole answer to a prompt, `new` tokens long whatever the model makes of it."""
        return await read(self.stream(prompt, new, **options))

    async def complete(self, request: inference_pb2.GenerateRequest) -> Answer:
        """The whole answer to a request."""
        return await read(self.inference.Generate(request))

    def stream(
        self, prompt: str = "Once upon a time", new: int = 8, timeout: float | None = None, **options: Any
    ) -> Any:
        """The open call of a prompt; it ends after `timeout` seconds."""
        request = inference_pb2.GenerateRequest(prompt=prompt, max_new_tokens=new, ignore_eos=True, **options)
        return self.inference.Generate(request, timeout=timeout)

    async def switch(
        self, mode: PrecisionMode, in_flight: InFlight = IN_FLIGHT_MIGRATE, wait: bool = True
    ) -> control_pb2.SwitchPrecisionResponse:
        request = control_pb2.SwitchPrecisionRequest(mode=mode, in_flight=in_flight, wait=wait)
        response: control_pb2.SwitchPrecisionResponse = await self.control.SwitchPrecision(request)
        return response

    async def refusal(self, request: Message) -> tuple[grpc.StatusCode, str, list[Any]]:
        """Status, message and details that a request to the daemon's own services is refused with."""
        name = type(request).__name__.removesuffix("Request")
        method = getattr(self.inference if name == "Generate" else self.control, name)
        return await refusal(method(request))

    async def status(self) -> control_pb2.GetStatusResponse:
        response: control_pb2.GetStatusResponse = await self.control.GetStatus(control_pb2.GetStatusRequest())
        return response

    async def model(self) -> control_pb2.ModelStatus:
        """The state of the only model."""
        (model,) = (await self.status()).models
        return model

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[AsyncIterator[control_pb2.Event]]:
        """All events from now on."""
        call = self.control.WatchEvents(control_pb2.WatchEventsRequest())
        await call.initial_metadata()
        try:
            yield call
        finally:
            call.cancel()


async def read(call: Any) -> Answer:
    """What is left of the answer of an open call."""
    answer = Answer()
    while (response := await call.read()) is not grpc.aio.EOF:
        answer.add(response)
    return answer


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, list[Any]]:
    """Status, message and details of a call that must fail."""
    try:
        await (read(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    except grpc.aio.AioRpcError as error:
        status = await rpc_status.aio.from_call(call)
        return error.code(), error.details() or "", [unpacked(detail) for detail in status.details] if status else []
    pytest.fail("the call was answered")


def unpacked(packed: Any) -> Any:
    """A detail of google.rpc."""
    detail = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
    assert packed.Unpack(detail)
    return detail


@asynccontextmanager
async def connected(daemon: DaemonProcess) -> AsyncIterator[Client]:
    """A client with a connection of its own."""
    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(daemon.target, options=options) as channel:
        yield Client(channel)


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine function in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(_awaited(test(*args, **kwargs)))

    return run


async def _awaited(test: Awaitable[None]) -> None:
    await test
