"""Requests of one stream, answered at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc
from grpc_status import rpc_status

from dskapi.open_inference import infer_pb2
from dskapi.v1 import inference_pb2
from dskd.rpc.infer_request import fields_of_infer_request, generate_request
from dskd.rpc.infer_response import stream_response
from dskd.rpc.interceptor import STREAM_REQUEST, Context, failure, log_call, name_request
from dskd.rpc.responder import Responder
from dskd.rpc.tensor_responder import TensorResponder, final_response

MOST_OPEN = 64
"""Requests of one stream that are answered at a time; the next one is read when one of them has ended."""


class InferStream:
    """One call of ModelStreamInfer."""

    def __init__(self, responder: Responder, tensors: TensorResponder, context: Context) -> None:
        self._responder = responder
        self._tensors = tensors
        self._context = context
        self._free = asyncio.Semaphore(MOST_OPEN)
        self._sending = asyncio.Lock()  # one response at a time, says gRPC
        self._answers: set[asyncio.Task[None]] = set()
        self._newest: dict[str, asyncio.Task[None]] = {}  # by model: the answer to its newest request

    async def run(self, requests: AsyncIterator[infer_pb2.ModelInferRequest]) -> None:
        """Answers all `requests`. When that is cancelled, or one of them cannot be read, the open ones are too."""
        try:
            async for request in requests:
                await self._free.acquire()
                before = self._newest.get(request.model_name)
                answer = asyncio.create_task(self._answer(request, before), name="stream answer")
                self._newest[request.model_name] = answer
                self._answers.add(answer)
                answer.add_done_callback(partial(self._ended, request.model_name))
            await asyncio.gather(*self._answers)
        finally:
            for answer in self._answers:
                answer.cancel()
            await asyncio.gather(*self._answers, return_exceptions=True)

    def _ended(self, model: str, answer: asyncio.Task[None]) -> None:
        """One that could not even tell that it failed is kept, for `run` to fail with it."""
        self._free.release()
        if self._newest.get(model) is answer:
            del self._newest[model]
        if not answer.cancelled() and answer.exception() is None:
            self._answers.discard(answer)

    async def _answer(self, request: infer_pb2.ModelInferRequest, before: asyncio.Task[None] | None) -> None:
        """`before` answers the request to the same model that came before this one."""
        name_request()
        started, code = time.monotonic(), grpc.StatusCode.CANCELLED
        try:
            with fields_of_infer_request():
                await self._respond(request, before)
            code = grpc.StatusCode.OK
        except Exception as error:
            refusal = rpc_status.to_status(failure(error, STREAM_REQUEST))
            code = refusal.code
            response = infer_pb2.ModelStreamInferResponse(error_message=f"{code.name}: {refusal.details}")
            response.infer_response.id = request.id
            await self._send(response)
        finally:
            log_call(STREAM_REQUEST, code, started)

    async def _respond(self, request: infer_pb2.ModelInferRequest, before: asyncio.Task[None] | None) -> None:
        model = self._tensors.model_of(request)
        if model is None:
            await self._respond_with_text(request)
            return
        try:
            response = await self._tensors.respond(model, request)
        finally:
            if before is not None:  # a plain graph answers a stream in the order of its requests
                await asyncio.wait([before])
        await self._send(final_response(response))

    async def _respond_with_text(self, request: infer_pb2.ModelInferRequest) -> None:
        """Tokens without text, such as the first bytes of a character, are told together with the next text."""
        untold: list[inference_pb2.GenerateResponse] = []
        async with aclosing(self._responder.respond(generate_request(request))) as responses:
            async for response in responses:
                untold.append(response)
                if response.text or response.finish_reason:
                    await self._send(stream_response(request, untold))
                    untold = []

    async def _send(self, response: infer_pb2.ModelStreamInferResponse) -> None:
        async with self._sending:
            await self._context.write(response)
