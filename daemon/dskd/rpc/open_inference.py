"""The service of the Open Inference Protocol, for clients written for KServe and Triton."""
# The methods are named by the protocol.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TypeAlias

from dskapi.open_inference import (
    infer_pb2,
    model_config_pb2,
    repository_pb2,
    service_pb2,
    service_pb2_grpc,
    statistics_pb2,
)
from dskd.errors import InvalidArgumentError
from dskd.registry import ModelEntry, ModelRegistry
from dskd.rpc.infer_report import model_config, model_index, model_metadata, model_statistics
from dskd.rpc.infer_request import VERSION, check_version, fields_of_infer_request, generate_request
from dskd.rpc.infer_response import infer_response
from dskd.rpc.infer_stream import InferStream
from dskd.rpc.interceptor import Context, actor
from dskd.rpc.responder import Responder
from dskd.rpc.tensor_responder import TensorResponder
from dskd.states import ModelState
from dskquant.version import VERSION as DAEMON_VERSION

EXTENSIONS = ("model_configuration", "model_repository", "parameters", "statistics")
UNLOAD_DEPENDENTS = "unload_dependents"
"""Parameter that clients send with each unload; no model depends on another."""

NamedModel: TypeAlias = (
    service_pb2.ModelMetadataRequest | model_config_pb2.ModelConfigRequest | statistics_pb2.ModelStatisticsRequest
)


class OpenInferenceService(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Shows, loads and unloads the models of a registry, and answers with responders."""

    def __init__(
        self, registry: ModelRegistry, responder: Responder, tensors: TensorResponder, unload_grace_s: float
    ) -> None:
        """`responder` is for language models, `tensors` for plain graphs."""
        self._registry = registry
        self._responder = responder
        self._tensors = tensors
        self._unload_grace_s = unload_grace_s

    async def ServerLive(
        self, request: service_pb2.ServerLiveRequest, context: Context
    ) -> service_pb2.ServerLiveResponse:
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: service_pb2.ServerReadyRequest, context: Context
    ) -> service_pb2.ServerReadyResponse:
        return service_pb2.ServerReadyResponse(ready=any(map(_serves, self._registry.entries())))

    async def ModelReady(
        self, request: service_pb2.ModelReadyRequest, context: Context
    ) -> service_pb2.ModelReadyResponse:
        known = [entry for entry in self._registry.entries() if entry.name == request.name]
        return service_pb2.ModelReadyResponse(ready=request.version in ("", VERSION) and any(map(_serves, known)))

    async def ServerMetadata(
        self, request: service_pb2.ServerMetadataRequest, context: Context
    ) -> service_pb2.ServerMetadataResponse:
        return service_pb2.ServerMetadataResponse(name="dskd", version=DAEMON_VERSION, extensions=EXTENSIONS)

    async def ModelMetadata(
        self, request: service_pb2.ModelMetadataRequest, context: Context
    ) -> service_pb2.ModelMetadataResponse:
        model = self._model(request)
        return model_metadata(model.name, model.serving_host)

    async def ModelConfig(
        self, request: model_config_pb2.ModelConfigRequest, context: Context
    ) -> model_config_pb2.ModelConfigResponse:
        model = self._model(request)
        return model_config(model.name, model.host)

    async def ModelStatistics(
        self, request: statistics_pb2.ModelStatisticsRequest, context: Context
    ) -> statistics_pb2.ModelStatisticsResponse:
        shown = [self._model(request)] if request.name else self._registry.entries()
        tallies = self._responder.tallies
        return statistics_pb2.ModelStatisticsResponse(
            model_stats=[model_statistics(model, tallies[model.name]) for model in shown]
        )

    async def RepositoryIndex(
        self, request: repository_pb2.RepositoryIndexRequest, context: Context
    ) -> repository_pb2.RepositoryIndexResponse:
        _check_repository(request.repository_name)
        shown = [model for model in self._registry.entries() if _serves(model) or not request.ready]
        return repository_pb2.RepositoryIndexResponse(models=map(model_index, shown))

    async def RepositoryModelLoad(
        self, request: repository_pb2.RepositoryModelLoadRequest, context: Context
    ) -> repository_pb2.RepositoryModelLoadResponse:
        """Answers when the model serves, at once if it does; the load goes on when the client goes away."""
        _check_repository(request.repository_name)
        _check_parameters(request.parameters)
        if not _serves(self._registry.get(request.model_name)):
            await self._registry.load(request.model_name, actor(context))
        return repository_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: repository_pb2.RepositoryModelUnloadRequest, context: Context
    ) -> repository_pb2.RepositoryModelUnloadResponse:
        _check_repository(request.repository_name)
        _check_parameters(request.parameters, UNLOAD_DEPENDENTS)
        await self._registry.unload(request.model_name, actor(context), self._unload_grace_s)
        return repository_pb2.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: infer_pb2.ModelInferRequest, context: Context) -> infer_pb2.ModelInferResponse:
        """A client that goes away, or whose deadline passes, cancels this coroutine and with it the request."""
        with fields_of_infer_request():
            model = self._tensors.model_of(request)
            if model is not None:
                return await self._tensors.respond(model, request)
            async with aclosing(self._responder.respond(generate_request(request))) as responses:
                return infer_response(request, [response async for response in responses])

    async def ModelStreamInfer(self, requests: AsyncIterator[infer_pb2.ModelInferRequest], context: Context) -> None:
        await InferStream(self._responder, self._tensors, context).run(requests)

    def _model(self, request: NamedModel) -> ModelEntry:
        check_version("version", request.version)
        return self._registry.get(request.name)


def _serves(model: ModelEntry) -> bool:
    return model.state is ModelState.SERVING


def _check_repository(name: str) -> None:
    if name:
        raise InvalidArgumentError("repository_name", "must be empty: there is one repository")


def _check_parameters(parameters: Mapping[str, object], *known: str) -> None:
    for name in parameters:
        if name not in known:
            raise InvalidArgumentError(f"parameters.{name}", f"is not known; known: {', '.join(known) or 'none'}")
