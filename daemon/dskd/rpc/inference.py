"""The Inference service."""

from __future__ import annotations

from contextlib import aclosing

from dskapi.v1 import inference_pb2, inference_pb2_grpc
from dskd.rpc.interceptor import Context
from dskd.rpc.responder import Responder


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Streams the answers of a responder."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Streams one answer. A client that goes away, or whose deadline passes, cancels this coroutine."""
        async with aclosing(self._responder.respond(request)) as responses:
            async for response in responses:
                await context.write(response)
