"""What all methods of the daemon's own services share: log context, well-formed requests, statuses with details."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from dskd.errors import EXPECTED_ERRORS, InvalidArgumentError
from dskd.rpc.status import status_of

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()

_logger = logging.getLogger(__name__)
"""Where the lines of `log` go in the end: it can say at once whether anybody wants them."""

_INFERENCE = "/inference.GRPCInferenceService/Model"
STREAM_REQUEST = f"request of {_INFERENCE}StreamInfer"
"""In the log, beside the line of the stream itself."""

FREQUENT = frozenset({f"{_INFERENCE}Infer", STREAM_REQUEST})

OWN_SERVICES = ("/dskapi.", "/inference.")
LONGEST_NAME = 100
"""Characters of a model name that get into the log; a client may send any."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""Names the call being answered, in responses and in the log."""

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of our services, which are coroutines (streaming ones use `context.write`)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OWN_SERVICES):
            return handler
        deserialize: Any = handler.request_deserializer
        read = partial(_decoded_each if handler.request_streaming else _decoded, deserialize)
        if handler.request_streaming:
            both = _answering(method, handler.stream_stream, read)
            return grpc.stream_stream_rpc_method_handler(both, response_serializer=handler.response_serializer)
        if handler.response_streaming:
            stream = _answering(method, handler.unary_stream, read)
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
        single = _answering(method, handler.unary_unary, read)
        return grpc.unary_unary_rpc_method_handler(single, response_serializer=handler.response_serializer)


def name_request() -> str:
    """A new id for the request that the running task answers; it stays in the context of the task."""
    request_id = f"{random.getrandbits(128):032x}"  # a name, no secret; made for every call
    REQUEST_ID.set(request_id)
    structlog.contextvars.bind_contextvars(request_id=request_id)
    return request_id


def failure(error: Exception, method: str) -> Status:
    """What a client gets for the `error` being handled; the log explains it if nobody expected it."""
    if not isinstance(error, EXPECTED_ERRORS):
        log.exception("unexpected error", method=method, error_id=REQUEST_ID.get())
    return status_of(error, REQUEST_ID.get())


def log_call(method: str, code: grpc.StatusCode, started: float) -> None:
    """A line for a request that has ended; `started` is of `time.monotonic`.

    Of calls that come thousands of times a second and went well, only at level debug: a line takes as long as the rest.
    """
    is_routine = method in FREQUENT and code is grpc.StatusCode.OK
    if is_routine and not _logger.isEnabledFor(logging.DEBUG):
        return
    tell = log.debug if is_routine else log.info
    tell("call", method=method, code=code.name, milliseconds=round((time.monotonic() - started) * 1e3, 1))


def actor(context: Context) -> str:
    """`rpc:unix` or `rpc:ipv4:127.0.0.1:50412`; the other end of a unix socket has no name."""
    return f"rpc:{context.peer().rstrip(':')}"


# The behaviours are typed as those of the synchronous server by the stubs of grpc; hence Any.
def _answering(method: str, behaviour: Any, read: Callable[[Any], Any]) -> Any:
    """A handler of raw requests around `behaviour`, so that an undecodable request gets a status of ours too."""

    async def answer(raw: Any, context: Context) -> Any:
        name_request()  # each call runs in a task, hence in a context of its own
        started = time.monotonic()
        code = grpc.StatusCode.CANCELLED
        try:
            try:
                response = await behaviour(read(raw), context)
                code = grpc.StatusCode.OK
                return response
            except Exception as error:
                packed = rpc_status.to_status(failure(error, method))
                code = packed.code
            # gRPC keeps the exception that `abort` raises in a cycle with its frames until the next collection of
            # garbage: they must not hold the request, nor the error whose frames do.
            raw = None
            await context.abort(packed.code, packed.details, packed.trailing_metadata)
        finally:
            log_call(method, code, started)

    return answer


async def _decoded_each(deserialize: Callable[[bytes], Any], raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for raw in raws:
        yield _decoded(deserialize, raw)


def _decoded(deserialize: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        request = deserialize(raw)
    except DecodeError as error:
        raise InvalidArgumentError("request", f"cannot be decoded: {error}") from error
    if model := getattr(request, "model", "") or getattr(request, "model_name", ""):
        structlog.contextvars.bind_contextvars(model=model[:LONGEST_NAME])
    return request
