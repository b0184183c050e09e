"""The Inference service."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import structlog

from dskapi.v1 import inference_pb2, inference_pb2_grpc
from dskd.registry import ModelRegistry
from dskd.rpc.answer import Answer
from dskd.rpc.gate import Gate
from dskd.rpc.interceptor import REQUEST_ID, Context
from dskd.rpc.parse import parse_request

PARSING_THREADS = 2
"""Their own: long prompts and endless chat templates hold up other prompts, but no unload and no state file."""


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers requests with the models of a registry."""

    def __init__(self, registry: ModelRegistry, gate: Gate) -> None:
        self._registry = registry
        self._gate = gate
        self._parsing = ThreadPoolExecutor(PARSING_THREADS, thread_name_prefix="parse")

    def close(self) -> None:
        """Lets go of the threads; no request may follow."""
        self._parsing.shutdown(wait=False, cancel_futures=True)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Streams one answer. A client that goes away, or whose deadline passes, cancels this coroutine."""
        arrived = time.monotonic()
        with self._gate.enter():
            model = self._registry.resolve(request.model)
            structlog.contextvars.bind_contextvars(model=model.name)
            host = model.serving_host
            parsed = await asyncio.get_running_loop().run_in_executor(
                self._parsing, parse_request, request, REQUEST_ID.get(), host.codec, host.manifest
            )
            answer = Answer(parsed, model.name, host.codec, arrived)
            async with aclosing(host.generate(parsed.generation)) as outputs:
                async for output in outputs:
                    await context.write(answer.respond(output))
                    if answer.finish:
                        break
