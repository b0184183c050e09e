"""From a GenerateRequest to the responses of one answer: what all services that generate text share."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import structlog

from dskapi.v1 import inference_pb2
from dskd.errors import FailedPreconditionError
from dskd.host import ModelHost, is_language
from dskd.registry import ModelEntry, ModelRegistry
from dskd.rpc.answer import Answer
from dskd.rpc.gate import Gate
from dskd.rpc.interceptor import REQUEST_ID
from dskd.rpc.parse import parse_request
from dskd.rpc.tally import Tally

PARSING_THREADS = 2
"""Their own: long prompts and endless chat templates hold up other prompts, but no unload and no state file."""


def language_host(model: ModelEntry) -> ModelHost:
    """The host of a language model that serves. Raises FailedPreconditionError for a plain graph."""
    host = model.serving_host
    if is_language(host):
        return host
    raise FailedPreconditionError(
        f"models/{model.name}",
        f"model {model.name!r} is a plain graph: it takes tensors (ModelInfer), and makes no text",
    )


class Responder:
    """Answers requests with the models of a registry. Belongs to the asyncio thread."""

    def __init__(self, registry: ModelRegistry, gate: Gate) -> None:
        self._registry = registry
        self._gate = gate
        self._parsing = ThreadPoolExecutor(PARSING_THREADS, thread_name_prefix="parse")
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)  # by model

    def close(self) -> None:
        """Lets go of the threads; no request may follow."""
        self._parsing.shutdown(wait=False, cancel_futures=True)

    async def respond(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The responses to a request, as they are made; its id is REQUEST_ID. Raises DskdError when it is refused.

        Closing the generator early cancels the request and frees all it holds.
        """
        arrived = time.monotonic()
        with self._gate.enter():
            model = self._registry.resolve(request.model)
            structlog.contextvars.bind_contextvars(model=model.name)
            host = language_host(model)
            with self.tallies[model.name].failures(arrived):
                parsed = await asyncio.get_running_loop().run_in_executor(
                    self._parsing, parse_request, request, REQUEST_ID.get(), host.codec, host.manifest
                )
                parsing_s = time.monotonic() - arrived
                answer = Answer(parsed, model.name, host.codec, arrived)
                async with aclosing(host.generate(parsed.generation)) as outputs:
                    async for output in outputs:
                        response = answer.respond(output)
                        if answer.finish:
                            self.tallies[model.name].add(response.timings, parsing_s)
                        yield response
                        if answer.finish:
                            break
