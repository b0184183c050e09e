"""The Control service."""
# The methods are named by the protocol.
# ruff: noqa: N802

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import structlog

from dskapi.v1 import control_pb2, control_pb2_grpc
from dskd import memory
from dskd.config import MODEL_NAME, ModelConfig, ServerConfig
from dskd.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from dskd.manager.events import EventBus, Subscription
from dskd.manager.history import KEPT_ENTRIES, History
from dskd.monitor.config import MonitorConfig
from dskd.quant_config import difference
from dskd.registry import ModelRegistry
from dskd.rpc.convert import MODES, chosen_in_flight, chosen_mode, timestamp
from dskd.rpc.interceptor import Context, actor
from dskd.rpc.noise_report import noise_response
from dskd.rpc.one_at_a_time import OneAtATime
from dskd.rpc.quant_request import QuantRequestReader
from dskd.rpc.report import (
    change_response,
    event_message,
    history_response,
    model_status,
    model_summary,
    switch_response,
)
from dskd.states import ModelState
from dskquant.version import VERSION

DEFAULT_HISTORY = 100
DAEMON_STOPPED = "daemon.stopped"
"""Kind of the last event; it ends every watch."""


class ControlService(control_pb2_grpc.ControlServicer):
    """Shows and changes the models of a registry."""

    def __init__(
        self,
        config: ServerConfig,
        monitor: MonitorConfig,
        registry: ModelRegistry,
        events: EventBus,
        history: History,
        watched: Path | None,
    ) -> None:
        """`monitor` is for models without one of their own; `watched` is the directory whose quant configs are applied,
        if there is one.
        """
        self._config = config
        self._monitor = monitor
        self._quant_requests = QuantRequestReader(watched, config.allow_load_from_path)
        self._reading = OneAtATime("quant configs")
        self._registry = registry
        self._events = events
        self._history = history
        self._started = time.time()

    async def SwitchPrecision(
        self, request: control_pb2.SwitchPrecisionRequest, context: Context
    ) -> control_pb2.SwitchPrecisionResponse:
        mode = chosen_mode(request.mode, "mode")
        if mode is None:
            raise InvalidArgumentError("mode", f"is needed; known: {', '.join(mode.value for mode in MODES)}")
        in_flight = chosen_in_flight(request.in_flight, "in_flight")
        model = self._registry.resolve(request.model)
        report = await model.serving_host.switch(mode, in_flight, actor(context), request.wait, request.pin)
        return switch_response(model.name, report)

    async def ApplyConfig(
        self, request: control_pb2.ApplyConfigRequest, context: Context
    ) -> control_pb2.ChangeResponse:
        config = await self._reading.run(partial(self._quant_requests.read, request, context.peer()))
        model = self._registry.get(config.model)
        structlog.contextvars.bind_contextvars(model=model.name)
        change = difference(None, config, model.default_mode)
        report = await model.serving_host.apply(change, actor(context), dry_run=request.dry_run, wait=request.wait)
        return change_response(model.name, report)

    async def Rollback(self, request: control_pb2.RollbackRequest, context: Context) -> control_pb2.ChangeResponse:
        in_flight = chosen_in_flight(request.in_flight, "in_flight")
        model = self._registry.resolve(request.model)
        generation = request.generation or None
        report = await model.serving_host.rollback(generation, in_flight, actor(context), request.wait)
        return change_response(model.name, report)

    async def GetStatus(self, request: control_pb2.GetStatusRequest, context: Context) -> control_pb2.GetStatusResponse:
        if request.model:
            shown = [self._registry.get(request.model)]
        else:
            shown = [entry for entry in self._registry.entries() if entry.state is not ModelState.UNLOADED]
        return control_pb2.GetStatusResponse(
            version=VERSION,
            pid=os.getpid(),
            started=timestamp(self._started),
            rss_bytes=memory.rss_bytes(),
            available_bytes=memory.available_bytes(),
            models=map(model_status, shown),
        )

    async def ListModels(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        return control_pb2.ListModelsResponse(models=map(model_summary, self._registry.entries()))

    async def LoadModel(self, request: control_pb2.LoadModelRequest, context: Context) -> control_pb2.LoadModelResponse:
        """Answers when the model serves; the load goes on when the client goes away."""
        started = time.monotonic()
        if not request.model:
            raise InvalidArgumentError("model", "must not be empty")
        if request.path:
            self._registry.add(request.model, self._config_from_path(request))
        await self._registry.load(request.model, actor(context))
        return control_pb2.LoadModelResponse(
            model=model_status(self._registry.get(request.model)), load_ms=_ms_since(started)
        )

    def _config_from_path(self, request: control_pb2.LoadModelRequest) -> ModelConfig:
        if not self._config.allow_load_from_path:
            raise FailedPreconditionError(
                "server.allow_load_from_path",
                "the configuration does not allow to load a model from a path ([server] allow_load_from_path)",
            )
        if not MODEL_NAME.fullmatch(request.model):
            raise InvalidArgumentError("model", f"{request.model!r} is no name; allowed: {MODEL_NAME.pattern}")
        if not Path(request.path).is_absolute():
            raise InvalidArgumentError("path", f"{request.path!r} must be absolute")
        return ModelConfig(path=Path(request.path))

    async def UnloadModel(
        self, request: control_pb2.UnloadModelRequest, context: Context
    ) -> control_pb2.UnloadModelResponse:
        started = time.monotonic()
        model = self._registry.resolve(request.model)
        aborted = await self._registry.unload(model.name, actor(context), self._config.grace_s)
        return control_pb2.UnloadModelResponse(model=model.name, aborted_requests=aborted, unload_ms=_ms_since(started))

    async def GetNoise(self, request: control_pb2.GetNoiseRequest, context: Context) -> control_pb2.GetNoiseResponse:
        model = self._registry.resolve(request.model)
        window = (model.config.monitor or self._monitor).window
        if not 0 <= request.samples <= window:
            raise InvalidArgumentError("samples", f"{request.samples} is not allowed; allowed: 0 to {window}")
        return noise_response(model.name, model.serving_host.noise(request.samples))

    async def GetHistory(
        self, request: control_pb2.GetHistoryRequest, context: Context
    ) -> control_pb2.GetHistoryResponse:
        if not 0 <= request.limit <= KEPT_ENTRIES:
            raise InvalidArgumentError("limit", f"{request.limit} is not allowed; allowed: 0 to {KEPT_ENTRIES}")
        model = self._registry.get(request.model).name if request.model else None
        entries = self._history.newest(model, request.limit or DEFAULT_HISTORY)
        return history_response(entries, self._config.max_message_bytes)

    async def WatchEvents(self, request: control_pb2.WatchEventsRequest, context: Context) -> None:
        """Sends its initial metadata at once: a client that has them misses no later event."""
        if request.model:
            self._registry.get(request.model)
        with self._events.subscribe() as subscription:
            await context.send_initial_metadata(())
            told_lost = 0
            async for event in subscription:
                if subscription.lost > told_lost:
                    await context.write(_lost_message(subscription, told_lost))
                    told_lost = subscription.lost
                if event.model in ("", request.model) or not request.model:
                    await context.write(event_message(event))
                if event.kind == DAEMON_STOPPED:
                    raise UnavailableError("the daemon has stopped")


def _lost_message(subscription: Subscription, told: int) -> control_pb2.Event:
    lost = subscription.lost - told
    message = control_pb2.Event(
        time=timestamp(time.time()), kind="events.lost", message=f"{lost} events were lost: the client is too slow"
    )
    message.fields.update({"lost": lost})
    return message


def _ms_since(started: float) -> float:
    return (time.monotonic() - started) * 1e3
