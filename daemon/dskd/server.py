"""The life of the daemon: startup, serving, shutdown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from dskapi.open_inference import service_pb2, service_pb2_grpc
from dskapi.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from dskd import systemd
from dskd.address import Address
from dskd.config import Config
from dskd.host import HostFactory
from dskd.listen import bind
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.monitor.metrics import EventMetrics, ModelCollector, ModelFigures
from dskd.monitor.metrics_server import MetricsServer
from dskd.registry import ModelRegistry
from dskd.rpc.control import DAEMON_STOPPED, ControlService
from dskd.rpc.gate import Gate
from dskd.rpc.inference import InferenceService
from dskd.rpc.interceptor import CallInterceptor
from dskd.rpc.open_inference import OpenInferenceService
from dskd.rpc.responder import Responder
from dskd.rpc.tensor_responder import TensorResponder
from dskd.states import ModelState
from dskd.watch.registry_target import RegistryTarget
from dskd.watch.watcher import Watcher

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()

LAST_WORDS_S = 1.0
"""Time for streams to carry their last responses and statuses after the models are gone, and for models to go after
the grace period: a build cannot be stopped, and is left to the end of the process."""

CLEAN, FORCED = 0, 1
"""Exit codes: everything finished within the grace period or was told so; a second signal cut it short."""

WATCH_STATE = "watch.json"
"""In the state directory: what the watched directory said last."""

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["Control"].full_name,
    service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
    health.SERVICE_NAME,
    reflection.SERVICE_NAME,
)


class Daemon:
    """One daemon; `run` is its whole life. Make it inside a running event loop."""

    def __init__(
        self,
        config: Config,
        make_host: HostFactory,
        history: History | None = None,
        figures: CollectorRegistry | None = None,
        counters: EventMetrics | None = None,
    ) -> None:
        """Without `history` one is kept in memory alone.

        `figures` are what `[metrics] listen` answers with, `counters` those of them that count what happens.
        """
        self.config = config
        self.events = EventBus()
        self.history = history or History()
        self.registry = ModelRegistry(config.models, make_host, self.events, self.history)
        self.addresses: tuple[Address, ...] = ()  # those really bound
        self._gate = Gate(config.server.max_concurrent_requests)
        self._health = health.aio.HealthServicer()
        self._responder = Responder(self.registry, self._gate)
        self._tensors = TensorResponder(self.registry, self._gate, self._responder.tallies)
        self._watcher = self._make_watcher()
        self._watching: asyncio.Task[None] | None = None
        self._figures = figures or CollectorRegistry()
        self._counters = counters or EventMetrics(self._figures)
        self._counting: asyncio.Task[None] | None = None
        self._metrics: MetricsServer | None = None
        self._server = self._make_server()
        self._stop_asked = asyncio.Event()
        self._force_asked = asyncio.Event()
        self._readiness: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serves until `stop` is called; returns the exit code. Raises StartupError when it cannot begin."""
        try:
            await self.startup()
            await self._stop_asked.wait()
        finally:
            code = await self.shutdown()
        return code

    def stop(self) -> None:
        """Asks for an orderly end; the second call asks for an immediate one."""
        if self._stop_asked.is_set():
            self._force_asked.set()
        self._stop_asked.set()

    def rescan(self) -> None:
        """Looks at the watched directory anew, and tries again what was refused."""
        if self._watcher is None:
            log.warning("SIGHUP does nothing: no directory is watched ([watch] directory)")
        else:
            self._watcher.rescan()

    async def startup(self) -> None:
        """Answers on all addresses and begins to load the models; readiness comes with the first that serves."""
        await self._show_readiness()
        self.addresses = bind(self._server, self.config.server)
        await self._server.start()
        self._readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        for name, model in self.config.models.items():
            if model.load:
                self.registry.start_load(name, "config")
        self._start_metrics()
        if self._watcher:
            self._watching = asyncio.create_task(self._watcher.run(), name="watch")
        log.info("listening", addresses=[str(address) for address in self.addresses])
        systemd.notify("READY=1")

    async def shutdown(self) -> int:
        """Refuses new requests, lets open ones finish within the grace period, and ends."""
        log.info("stopping", grace_s=self.config.server.grace_s)
        systemd.notify("STOPPING=1")
        self._gate.close()
        await _end(self._watching)
        await self._health.enter_graceful_shutdown()
        self.events.publish("daemon.stopping", "", "the daemon is shutting down")
        forced = await self._drain()
        self.events.publish(DAEMON_STOPPED, "", "the daemon has stopped")
        await self._server.stop(0 if forced else LAST_WORDS_S)
        self._responder.close()
        await _end(self._readiness)
        await _end(self._counting)
        if self._metrics:
            await asyncio.to_thread(self._metrics.stop)
        log.info("stopped", forced=forced)
        return FORCED if forced else CLEAN

    async def _drain(self) -> bool:
        """Unloads all models, or gives up soon after the grace period; True when a second signal cut it short."""
        grace_s = self.config.server.grace_s
        closing = asyncio.create_task(self.registry.close(grace_s))
        force = asyncio.create_task(self._force_asked.wait())
        await asyncio.wait({closing, force}, timeout=grace_s + LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        force.cancel()
        if closing.done():
            log.info("drained", aborted_requests=closing.result())
            return False
        closing.cancel()
        if not self._force_asked.is_set():
            log.warning("gave up waiting for the models")
            return False
        aborting = asyncio.create_task(self.registry.abort())
        await asyncio.wait({aborting}, timeout=LAST_WORDS_S)
        aborting.cancel()
        return True

    async def _follow_readiness(self) -> None:
        with self.events.subscribe() as events:
            await self._show_readiness()
            async for _ in events:
                await self._show_readiness()

    async def _show_readiness(self) -> None:
        """The health of a model is its own; that of the daemon ("") is whether any model serves."""
        serving = {entry.name: entry.state is ModelState.SERVING for entry in self.registry.entries()}
        for service, ready in {**serving, "": any(serving.values())}.items():
            status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._health.set(service, status)

    def _start_metrics(self) -> None:
        if self.config.metrics.listen is None:
            return
        self._counting = asyncio.create_task(self._count_changes(), name="count changes")
        self._figures.register(ModelCollector(self._model_figures, asyncio.get_running_loop()))
        self._metrics = MetricsServer(self.config.metrics.listen, self._figures)
        log.info("metrics", address=str(self._metrics.start()))

    async def _count_changes(self) -> None:
        with self.events.subscribe() as events:
            await self._counters.count_changes(events)

    def _model_figures(self) -> Iterator[ModelFigures]:
        for entry in self.registry.entries():
            host = entry.host
            yield ModelFigures(
                entry.name, entry.state.value, host.snapshot() if host else None, host.noise(0) if host else None
            )

    def _make_watcher(self) -> Watcher | None:
        if self.config.watch.directory is None:
            return None
        state_file = self.config.server.state_dir / WATCH_STATE
        return Watcher(self.config.watch, state_file, RegistryTarget(self.registry), self.history, self.events)

    def _make_server(self) -> grpc.aio.Server:
        limit = self.config.server.max_message_bytes
        server = grpc.aio.server(
            interceptors=[CallInterceptor()],
            options=[
                ("grpc.max_receive_message_length", int(limit)),
                ("grpc.max_send_message_length", int(limit)),
                ("grpc.so_reuseport", 0),  # otherwise two daemons share a port without noticing
            ],
        )
        watched = self.config.watch.directory
        config = self.config
        control = ControlService(config.server, config.monitor, self.registry, self.events, self.history, watched)
        open_inference = OpenInferenceService(self.registry, self._responder, self._tensors, config.server.grace_s)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(self._responder), server)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(open_inference, server)
        control_pb2_grpc.add_ControlServicer_to_server(control, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(SERVICES, server)
        return server


async def _end(task: asyncio.Task[None] | None) -> None:
    if task:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def serve(
    config: Config, make_host: HostFactory, history: History, figures: CollectorRegistry, counters: EventMetrics
) -> int:
    """Runs a daemon that obeys signals: SIGTERM and SIGINT stop it, a second one at once; SIGHUP rescans.

    Returns the exit code.
    """
    daemon = Daemon(config, make_host, history, figures, counters)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    loop.add_signal_handler(signal.SIGHUP, daemon.rescan)
    return await daemon.run()
