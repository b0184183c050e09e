"""One plain graph in memory: its store, and the manager that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from dskd.config import DEFAULT_MODE, DEFAULT_RESIDENT, Config, ModelConfig
from dskd.errors import FailedPreconditionError
from dskd.managed_host import ManagedHost
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.monitor.metrics import EventMetrics
from dskd.plain.generation import modes_of
from dskd.plain.manager import PlainManager
from dskd.plain.request import TensorAnswer, TensorRequest
from dskquant.modes import REFERENCE, PrecisionMode
from dskquant.plain.store import PlainManifest


class PlainModelHost(ManagedHost[PlainManager]):
    """Implements `dskd.host.PlainHost`."""

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
        self._name = name
        self._model = model
        self._config = config
        self._events = events
        self._history = history
        self._metrics = metrics
        self._require_state_dir = require_state_dir

    async def load(self) -> None:
        self.manifest = await asyncio.to_thread(PlainManifest.read, self._model.path)
        self.config = effective_config(self._model, self.manifest)
        self._manager = PlainManager(
            self._name,
            self.config,
            self._config.scheduler,
            self._config.server.model_state(self._name),
            self._events,
            self._history,
            self._config.monitor,
            self._metrics,
            self._require_state_dir,
        )
        await self._manager.start()

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        return await self._manager.infer(request)


PREFERRED = (PrecisionMode.INT8, PrecisionMode.INT4, REFERENCE)
"""The mode to begin with, where none is configured: the first one there is. FP16 graphs are no faster on CPUs."""


def effective_config(config: ModelConfig, manifest: PlainManifest) -> ModelConfig:
    """`config`, or where it says nothing of modes the mode to begin with and the reference, which scores it.

    Raises FailedPreconditionError for modes that the store does not have.
    """
    if (config.resident, config.default_mode) == (DEFAULT_RESIDENT, DEFAULT_MODE):
        first = next(mode for mode in PREFERRED if mode in manifest.graphs)
        config = replace(config, default_mode=first, resident=tuple(dict.fromkeys((first, REFERENCE))))
    missing = [mode.value for mode in config.resident if mode not in manifest.graphs]
    if missing:
        known = modes_of(manifest)
        raise FailedPreconditionError("resident", f"{config.path} has no {', '.join(missing)}; it has: {known}")
    return config
