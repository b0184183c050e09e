"""What all methods of the daemon's own services share: log context, well-formed requests, statuses with details."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from dskd.errors import EXPECTED_ERRORS, InvalidArgumentError
from dskd.rpc.status import status_of

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()

OWN_SERVICES = "/dskapi."
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
        if handler.response_streaming:
            stream = _answering(method, handler.unary_stream, handler.request_deserializer)
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
        single = _answering(method, handler.unary_unary, handler.request_deserializer)
        return grpc.unary_unary_rpc_method_handler(single, response_serializer=handler.response_serializer)


# The behaviours are typed as those of the synchronous server by the stubs of grpc; hence Any.
def _answering(method: str, behaviour: Any, deserialize: Any) -> Any:
    """A handler of raw requests around `behaviour`, so that an undecodable request gets a status of ours too."""

    async def answer(raw: bytes, context: Context) -> Any:
        request_id = uuid.uuid4().hex
        REQUEST_ID.set(request_id)  # each call runs in a task, hence in a context of its own
        structlog.contextvars.bind_contextvars(request_id=request_id)
        started = time.monotonic()
        code = grpc.StatusCode.CANCELLED
        try:
            response = await behaviour(_decoded(raw, deserialize), context)
            code = grpc.StatusCode.OK
            return response
        except Exception as error:
            if not isinstance(error, EXPECTED_ERRORS):
                log.exception("unexpected error", method=method, error_id=request_id)
            packed = rpc_status.to_status(status_of(error, request_id))
            code = packed.code
            await context.abort(packed.code, packed.details, packed.trailing_metadata)
        finally:
            milliseconds = round((time.monotonic() - started) * 1e3, 1)
            log.info("call", method=method, code=code.name, milliseconds=milliseconds)

    return answer


def _decoded(raw: bytes, deserialize: Callable[[bytes], Any]) -> Any:
    try:
        request = deserialize(raw)
    except DecodeError as error:
        raise InvalidArgumentError("request", f"cannot be decoded: {error}") from error
    if model := getattr(request, "model", ""):
        structlog.contextvars.bind_contextvars(model=model[:LONGEST_NAME])
    return request
