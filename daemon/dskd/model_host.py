"""One language model in memory: its store, its tokenizer, and the QuantizerManager that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from dskd import state_lock
from dskd.config import Config, EngineUse, ModelConfig
from dskd.engine.request import GenerationRequest, StepOutput
from dskd.host import HostFactory, ServedModel
from dskd.managed_host import ManagedHost
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.manager import QuantizerManager
from dskd.monitor.metrics import EventMetrics
from dskd.plain.host import PlainModelHost
from dskd.text.tokenizer import TextCodec
from dskquant.engines import load_engine, load_slot_engine
from dskquant.plain.store import is_plain_store
from dskquant.store import StoreManifest


def host_factory(config: Config, metrics: EventMetrics | None = None) -> HostFactory:
    """Makes the hosts of the models of a daemon that is configured by `config`, and holds its state directory.

    Raises StartupError when another daemon holds it.
    """
    lock = state_lock.hold(config.server.state_dir)

    def make_host(name: str, model: ModelConfig, events: EventBus, history: History) -> ServedModel:
        kind = PlainModelHost if is_plain_store(model.path) else StoredModelHost
        return kind(name, model, config, events, history, metrics, lock.require)

    return make_host


class StoredModelHost(ManagedHost[QuantizerManager]):
    """A model of a store directory."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        config: Config,
        events: EventBus,
        history: History,
        metrics: EventMetrics | None,
        require_state_dir: Callable[[], None],
    ) -> None:
        self._store = model.path
        self._manager = QuantizerManager(
            name,
            model,
            config.scheduler,
            load_engine(EngineUse.OPENVINO.value),
            config.server.model_state(name),
            events,
            history,
            config.monitor,
            metrics,
            None if model.engine is EngineUse.OPENVINO else load_slot_engine(EngineUse.ONNXRUNTIME.value),
            require_state_dir,
        )

    async def load(self) -> None:
        self.manifest: StoreManifest = await asyncio.to_thread(StoreManifest.read, self._store)
        self.codec: TextCodec = await asyncio.to_thread(TextCodec.load, self._store)
        await self._manager.start()

    def generate(self, request: GenerationRequest) -> AsyncGenerator[StepOutput, None]:
        return self._manager.generate(request)
