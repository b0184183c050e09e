"""The calls of one daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from dskapi.v1 import control_pb2 as control
from dskapi.v1 import inference_pb2 as inference
from dskapi.v1.control_pb2_grpc import ControlStub
from dskapi.v1.inference_pb2_grpc import InferenceStub
from dskctl.address import UNIX
from dskctl.exits import UsageError

T_co = TypeVar("T_co", covariant=True)

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
    """Responses as they come."""

    def __iter__(self) -> Iterator[T_co]: ...

    def cancel(self) -> object:
        """Ends the call; without effect when it has ended."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """Every call of the protocol, bound to one deadline. They raise grpc.RpcError."""

    switch_precision: Callable[[control.SwitchPrecisionRequest], control.SwitchPrecisionResponse]
    get_status: Callable[[control.GetStatusRequest], control.GetStatusResponse]
    list_models: Callable[[control.ListModelsRequest], control.ListModelsResponse]
    load_model: Callable[[control.LoadModelRequest], control.LoadModelResponse]
    unload_model: Callable[[control.UnloadModelRequest], control.UnloadModelResponse]
    get_history: Callable[[control.GetHistoryRequest], control.GetHistoryResponse]
    watch_events: Callable[[control.WatchEventsRequest], Stream[control.Event]]
    generate: Callable[[inference.GenerateRequest], Stream[inference.GenerateResponse]]

    @classmethod
    def over(cls, channel: grpc.Channel, timeout_s: float | None = None) -> Daemon:
        """The calls over `channel`, each given `timeout_s` seconds (None: as long as it takes)."""
        control_stub, inference_stub = _stub(ControlStub, channel), _stub(InferenceStub, channel)
        return cls(
            switch_precision=partial(control_stub.SwitchPrecision, timeout=timeout_s),
            get_status=partial(control_stub.GetStatus, timeout=timeout_s),
            list_models=partial(control_stub.ListModels, timeout=timeout_s),
            load_model=partial(control_stub.LoadModel, timeout=timeout_s),
            unload_model=partial(control_stub.UnloadModel, timeout=timeout_s),
            get_history=partial(control_stub.GetHistory, timeout=timeout_s),
            watch_events=partial(control_stub.WatchEvents, timeout=timeout_s),
            generate=partial(inference_stub.Generate, timeout=timeout_s),
        )


def _stub(stub_class: Callable[[grpc.Channel], Any], channel: grpc.Channel) -> Any:
    """The generated stubs carry no types; the fields of Daemon give them."""
    return stub_class(channel)
