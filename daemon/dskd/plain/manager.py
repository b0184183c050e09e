"""The manager of one plain graph: what serves it, and how that changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dskd.config import ModelConfig, SchedulerConfig
from dskd.engine.request import LoopSnapshot
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.model_manager import SETS, ModelManager, Parts
from dskd.manager.parts import ServedGeneration
from dskd.manager.transitions import Serving
from dskd.manager.types import ManagerSnapshot, ModeState, SecondEngineState
from dskd.monitor.config import MonitorConfig
from dskd.monitor.metrics import EventMetrics
from dskd.monitor.states import NoiseMeasure
from dskd.plain.batch_core import Outcome
from dskd.plain.batch_loop import BatchLoop
from dskd.plain.build import PlainBuilder, PlainProver
from dskd.plain.catalogue import PlainCatalogue
from dskd.plain.engines import EngineChoice
from dskd.plain.request import TensorAnswer, TensorRequest
from dskd.plain.waiting import ALONE, Waiting, shapes_of
from dskquant.modes import PrecisionMode

NO_CACHE = object()
"""What plain graphs are bound to."""


class PlainManager(ModelManager):
    """Serves a plain graph, and changes what serves it. All methods belong to the asyncio thread."""

    measure = NoiseMeasure.NOISE_TO_SIGNAL
    _loop: BatchLoop

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        scheduler: SchedulerConfig,
        state_dir: Path,
        events: EventBus,
        history: History,
        monitor: MonitorConfig | None = None,
        metrics: EventMetrics | None = None,
        require_state_dir: Callable[[], None] = lambda: None,
    ) -> None:
        """See `ModelManager`."""
        super().__init__(name, config, state_dir, events, history, monitor, metrics, require_state_dir)
        self._scheduler = scheduler

    async def _prepare(self) -> Parts:
        depot = self._state_dir / SETS
        engine = self._config.engine.value
        catalogue = await asyncio.to_thread(PlainCatalogue, self._config.path, depot, engine)
        await asyncio.to_thread(catalogue.forget_leftovers)
        manifest = catalogue.default.manifest
        self._has_batches = manifest.batch_axis == 0
        choice = await asyncio.to_thread(EngineChoice, self._config, self._has_batches, self._state_dir)
        builder = PlainBuilder(choice, self._config.threads, catalogue.default, PlainProver(self._config.proof))
        return Parts(engine, catalogue, builder, proofs_are_absolute=True, close=builder.close)

    async def _start_loop(self, serving: Serving) -> None:
        self._asyncio = asyncio.get_running_loop()
        batching = self._config.batching if self._has_batches else None
        self._loop = BatchLoop(
            self._name,
            batching or ALONE,
            self._scheduler.max_waiting,
            serving.mode,
            serving.generation.number,
            self._deliver,
            self._observe,
        )
        self._loop.start()
        self._residency.serve(serving.generation)
        try:
            await self._residency.attach(self._loop, NO_CACHE)
        except BaseException:
            await asyncio.to_thread(self._loop.stop)
            raise

    def snapshot(self) -> ManagerSnapshot:
        """The engine is that of the mode that serves."""
        now = super().snapshot()
        serving = next(state for state in now.modes if state.mode is now.mode)
        return replace(now, engine=serving.engine or now.engine)

    def _mode_state(self, mode: PrecisionMode, generation: ServedGeneration, loop: LoopSnapshot) -> ModeState:
        state = super()._mode_state(mode, generation, loop)
        graph = self._residency.graph_of(generation, mode)
        return replace(state, engine=graph.engine, engines=graph.engines) if graph else state

    def _second_state(self, generation: ServedGeneration) -> SecondEngineState | None:
        return None

    # Requests

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        """The answer to a request. Cancelling this takes the request out of the line.

        A mode of its own that is not resident is made so first. Failures are raised as DskdError.
        """
        await self._transitions.settled()
        self._transitions.require_open()
        now = self._transitions.serving
        mode = request.precision or now.mode
        reply: asyncio.Future[TensorAnswer] = self._asyncio.create_future()
        arrived, number = time.perf_counter(), now.generation.number
        entry = Waiting(request, reply, arrived, self._rows(request), shapes_of(request), number)
        with self._residency.holding(now.generation, [mode]):
            await self._residency.ensure(now.generation, mode)
            self._loop.submit(entry)
            try:
                return await reply
            finally:
                if reply.cancelled():
                    self._loop.cancel(entry)

    def _rows(self, request: TensorRequest) -> int:
        if not self._has_batches:
            return 1
        return int(next(iter(request.tensors.values())).shape[0])

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Hands over what a batch made; for the batch loop's thread, which it never blocks."""
        self._asyncio.call_soon_threadsafe(_settle_replies, outcomes)


def _settle_replies(outcomes: list[Outcome]) -> None:
    for entry, outcome in outcomes:
        if entry.reply.done():  # its client has gone
            continue
        if isinstance(outcome, Exception):
            entry.reply.set_exception(outcome)
        else:
            entry.reply.set_result(outcome)
