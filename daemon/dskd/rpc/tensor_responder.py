"""From a ModelInferRequest to a plain graph, and from its answer to the response."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from functools import lru_cache

import structlog

from dskapi.open_inference import infer_pb2
from dskapi.v1 import inference_pb2
from dskd.errors import InvalidArgumentError
from dskd.host import PlainHost, is_plain
from dskd.plain.generation import modes_of
from dskd.plain.request import TensorAnswer, TensorRequest
from dskd.registry import ModelEntry, ModelRegistry
from dskd.rpc.gate import Gate
from dskd.rpc.infer_request import (
    EMPTY_FINAL,
    PARAMETER_KINDS,
    VERSION,
    check_version,
    chosen_precision,
    parameter_values,
)
from dskd.rpc.infer_response import FINAL, made_by
from dskd.rpc.interceptor import REQUEST_ID
from dskd.rpc.tally import Tally
from dskd.rpc.tensors import read_tensors, wanted_outputs, write_tensors

KINDS = {name: PARAMETER_KINDS[name] for name in ("precision", EMPTY_FINAL)}
"""The parameters of a request."""

SMALL_BYTES = 1 << 16
"""A message of at most this size is taken apart at once; a larger one with typed contents in a thread."""

LABELS = 256
"""Kept ready: models, times the modes, generations and engines that answer at the moment."""


class TensorResponder:
    """Answers requests with the plain graphs of a registry. Belongs to the asyncio thread."""

    def __init__(self, registry: ModelRegistry, gate: Gate, tallies: defaultdict[str, Tally]) -> None:
        self._registry = registry
        self._gate = gate
        self._tallies = tallies

    def model_of(self, request: infer_pb2.ModelInferRequest) -> ModelEntry | None:
        """The model that `request` means if it is a plain graph.

        Raises DskdError where it means none that is in memory: what tensors it should have had cannot be told.
        """
        model = self._registry.resolve(request.model_name)
        if model.host is not None:
            return model if is_plain(model.host) else None
        with self._tallies[model.name].failures(time.monotonic()):
            return model if is_plain(model.serving_host) else None

    async def respond(self, model: ModelEntry, request: infer_pb2.ModelInferRequest) -> infer_pb2.ModelInferResponse:
        """The response to a request. Raises DskdError when it is refused; cancelling this cancels it."""
        arrived = time.monotonic()
        with self._gate.enter():
            structlog.contextvars.bind_contextvars(model=model.name)
            host = model.serving_host
            with self._tallies[model.name].failures(arrived):
                if not is_plain(host):
                    raise InvalidArgumentError("model_name", f"{model.name} is no plain graph any more")
                return await self._answer(model, host, request, arrived)

    async def _answer(
        self, model: ModelEntry, host: PlainHost, request: infer_pb2.ModelInferRequest, arrived: float
    ) -> infer_pb2.ModelInferResponse:
        is_small = bool(request.raw_input_contents) or request.ByteSize() <= SMALL_BYTES
        request_id = REQUEST_ID.get()
        asked = (
            tensor_request(request, host, request_id)
            if is_small
            else await asyncio.to_thread(tensor_request, request, host, request_id)
        )
        wanted = wanted_outputs(request, host.manifest.outputs)
        parsing_s = time.monotonic() - arrived
        answer = await host.infer(asked)
        response = _labelled(model.name, request, answer)
        raw = bool(request.raw_input_contents)
        if is_small:
            write_tensors(response, answer.tensors, wanted, raw)
        else:
            await asyncio.to_thread(write_tensors, response, answer.tensors, wanted, raw)
        timings = inference_pb2.Timings(total_ms=(time.monotonic() - arrived) * 1e3, queue_ms=answer.queue_s * 1e3)
        self._tallies[model.name].add(timings, parsing_s)
        return response


def tensor_request(request: infer_pb2.ModelInferRequest, host: PlainHost, request_id: str) -> TensorRequest:
    """What `request` asks of a model. Raises InvalidArgumentError for the first field that is wrong."""
    check_version("model_version", request.model_version)
    given = parameter_values(request.parameters, KINDS)
    precision = chosen_precision(given)
    if precision is not None and precision not in host.manifest.graphs:
        known = modes_of(host.manifest)
        raise InvalidArgumentError("parameters.precision", f"the model has no {precision.value}; it has: {known}")
    return TensorRequest(request_id, read_tensors(request, host.manifest.inputs, host.manifest.batch_axis), precision)


def final_response(response: infer_pb2.ModelInferResponse) -> infer_pb2.ModelStreamInferResponse:
    """`response` as the only one, hence the last, to a request of a stream."""
    response.parameters[FINAL].bool_param = True
    return infer_pb2.ModelStreamInferResponse(infer_response=response)


def _labelled(model: str, request: infer_pb2.ModelInferRequest, answer: TensorAnswer) -> infer_pb2.ModelInferResponse:
    """A response without tensors yet that tells what made them."""
    response = infer_pb2.ModelInferResponse()
    response.CopyFrom(_label(model, answer.mode.value, answer.generation, answer.engine))
    response.id = request.id
    return response


@lru_cache(LABELS)
def _label(model: str, mode: str, generation: int, engine: str) -> infer_pb2.ModelInferResponse:
    """Must not be written: a copy of it takes a tenth of the time."""
    return infer_pb2.ModelInferResponse(
        model_name=model, model_version=VERSION, parameters=made_by(mode, generation, engine)
    )
