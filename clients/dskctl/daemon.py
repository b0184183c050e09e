"""The calls of one daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Protocol, TypeVar

import grpc

from dskapi.v1 import control_pb2 as control
from dskapi.v1 import inference_pb2 as inference
from dskapi.v1.control_pb2_grpc import ControlStub
from dskapi.v1.inference_pb2_grpc import InferenceStub
from dskctl.address import UNIX
from dskctl.exits import UsageError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LONGEST_WAIT_S = 0.5

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a long history is more than the default of 4 MiB
    ("grpc.enable_http_proxy", 0),  # the daemon is a neighbour, not a web site
)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the authority that signed the daemon's certificate; for mutual TLS a certificate and key."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises UsageError when a file cannot be read."""
        return grpc.ssl_channel_credentials(_pem(self.ca), _pem(self.key), _pem(self.certificate))


def _pem(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def open_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """A channel to `address` (checked already); it connects with the first call. Raises UsageError."""
    if tls is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    if address.startswith(UNIX):
        raise UsageError("TLS is for host:port; a unix socket is guarded by its file permissions")
    return grpc.secure_channel(address, tls.credentials(), options=_CHANNEL_OPTIONS)


class Stream(Protocol[T_co]):
    """A call of gRPC that is answered by a stream."""

    def __iter__(self) -> Iterator[T_co]: ...

    def cancel(self) -> object:
        """Ends the call; without effect when it has ended."""


def relayed(start: Callable[[], Stream[T]]) -> Generator[T, None, None]:
    """The responses of the call that `start` begins; it is cancelled when the generator is closed.

    Raises grpc.RpcError, and ValueError when the channel is closed already. A thread of its own begins and reads the
    call: Ctrl-C that strikes inside gRPC can leave its locks held, or the call half begun, and the channel hangs.
    """
    taken: Queue[T | Exception | None] = Queue()
    begun: Future[Stream[T]] = Future()
    try:
        threading.Thread(target=_take_all, args=(start, begun, taken), daemon=True).start()
        while (item := _taken(taken)) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        begun.add_done_callback(lambda begun: begun.result().cancel())  # at once, unless it has yet to begin


def _taken(taken: Queue[T]) -> T:
    """The next item. Ctrl-C that strikes just before a wait begins is only noticed when it ends: none lasts long."""
    while True:
        with suppress(Empty):
            return taken.get(timeout=LONGEST_WAIT_S)


def _take_all(start: Callable[[], Stream[T]], begun: Future[Stream[T]], taken: Queue[T | Exception | None]) -> None:
    """Puts each response, and at the end the error or None."""
    try:
        call = start()
        begun.set_result(call)
        for response in call:
            taken.put(response)
        taken.put(None)
    except Exception as error:  # whoever takes it raises it
        taken.put(error)


@dataclass(frozen=True, slots=True)
class Daemon:
    """Every call of the protocol, bound to one deadline. They raise grpc.RpcError."""

    switch_precision: Callable[[control.SwitchPrecisionRequest], control.SwitchPrecisionResponse]
    apply_config: Callable[[control.ApplyConfigRequest], control.ChangeResponse]
    rollback: Callable[[control.RollbackRequest], control.ChangeResponse]
    get_status: Callable[[control.GetStatusRequest], control.GetStatusResponse]
    list_models: Callable[[control.ListModelsRequest], control.ListModelsResponse]
    load_model: Callable[[control.LoadModelRequest], control.LoadModelResponse]
    unload_model: Callable[[control.UnloadModelRequest], control.UnloadModelResponse]
    get_noise: Callable[[control.GetNoiseRequest], control.GetNoiseResponse]
    get_history: Callable[[control.GetHistoryRequest], control.GetHistoryResponse]
    watch_events: Callable[[control.WatchEventsRequest], Generator[control.Event, None, None]]
    generate: Callable[[inference.GenerateRequest], Generator[inference.GenerateResponse, None, None]]

    @classmethod
    def over(cls, channel: grpc.Channel, timeout_s: float | None = None) -> Daemon:
        """The calls over `channel`, each given `timeout_s` seconds (None: as long as it takes)."""
        control_stub, inference_stub = _stub(ControlStub, channel), _stub(InferenceStub, channel)
        return cls(
            switch_precision=partial(control_stub.SwitchPrecision, timeout=timeout_s),
            apply_config=partial(control_stub.ApplyConfig, timeout=timeout_s),
            rollback=partial(control_stub.Rollback, timeout=timeout_s),
            get_status=partial(control_stub.GetStatus, timeout=timeout_s),
            list_models=partial(control_stub.ListModels, timeout=timeout_s),
            load_model=partial(control_stub.LoadModel, timeout=timeout_s),
            unload_model=partial(control_stub.UnloadModel, timeout=timeout_s),
            get_noise=partial(control_stub.GetNoise, timeout=timeout_s),
            get_history=partial(control_stub.GetHistory, timeout=timeout_s),
            watch_events=lambda request: relayed(partial(control_stub.WatchEvents, request, timeout=timeout_s)),
            generate=lambda request: relayed(partial(inference_stub.Generate, request, timeout=timeout_s)),
        )


def _stub(stub_class: Callable[[grpc.Channel], Any], channel: grpc.Channel) -> Any:
    """The generated stubs carry no types; the fields of Daemon give them."""
    return stub_class(channel)
