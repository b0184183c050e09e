"""The QuantizerManager of one language model: what serves it, and how that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import cast

from dskd import memory
from dskd.config import ModelConfig, SchedulerConfig
from dskd.engine.request import GenerationRequest, StepOutput
from dskd.engine.step_loop import StepLoop
from dskd.errors import EXPECTED_ERRORS, FailedPreconditionError
from dskd.manager.answers import AnswerQueues
from dskd.manager.build import Builder
from dskd.manager.catalogue import Catalogue
from dskd.manager.depot import SetDepot
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.model_manager import SETS, ModelManager, Parts
from dskd.manager.parts import ServedGeneration
from dskd.manager.proof import Prover
from dskd.manager.second_engine import SecondBuilder, prepare
from dskd.manager.transitions import Serving
from dskd.manager.types import SecondEngineState, SecondGraphState
from dskd.monitor.config import MonitorConfig
from dskd.monitor.metrics import EventMetrics
from dskd.monitor.states import NoiseMeasure
from dskquant import golden
from dskquant.engines.protocol import Engine, Graph, KVCache, SlotEngine
from dskquant.modes import LADDER


class QuantizerManager(ModelManager):
    """Serves a language model, and changes what serves it. All methods belong to the asyncio thread."""

    measure = NoiseMeasure.KL
    _loop: StepLoop

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        scheduler: SchedulerConfig,
        engine: Engine,
        state_dir: Path,
        events: EventBus,
        history: History,
        monitor: MonitorConfig | None = None,
        metrics: EventMetrics | None = None,
        slot_engine: SlotEngine | None = None,
        require_state_dir: Callable[[], None] = lambda: None,
    ) -> None:
        """`slot_engine` decodes where the configuration says so; `engine` does all else.

        For the others see `ModelManager`.
        """
        super().__init__(name, config, state_dir, events, history, monitor, metrics, require_state_dir)
        self._scheduler = scheduler
        self._engine = engine
        self._slot_engine = slot_engine

    async def _prepare(self) -> Parts:
        store, config = self._config.path, self._config
        depot = SetDepot(self._state_dir / SETS)
        await asyncio.to_thread(depot.forget_leftovers)
        catalogue = await asyncio.to_thread(Catalogue, store, depot, self._engine.name, config.options)
        prompts = await asyncio.to_thread(golden.read, store)
        prover = Prover(prompts, self._engine, config.proof)
        self._second, self._without_second = await asyncio.to_thread(self._prepare_second, prover)
        builder = Builder(self._engine, store, config.options, prover, self._second)
        return Parts(self._engine.name, catalogue, builder, prover.has_reference)

    def _prepare_second(self, prover: Prover) -> tuple[SecondBuilder | None, str]:
        """The second engine, or why there is none; "" where none is wanted."""
        if self._slot_engine is None:
            return None, ""
        try:
            return prepare(self._config, self._slot_engine, self._engine, prover, self._state_dir), ""
        except EXPECTED_ERRORS as error:
            self._log.warning("one engine serves alone", engine=self._engine.name, reason=str(error))
            return None, str(error)

    async def _start_loop(self, serving: Serving) -> None:
        graph = cast(Graph, self._residency.any_graph)
        cache = await asyncio.to_thread(self._allocate_cache, graph)
        self._answers = AnswerQueues()
        self._kv_cache_bytes = cache.nbytes
        self._loop = StepLoop(
            model=self._name,
            engine_name=self._engine.name,
            cache=cache,
            config=self._scheduler,
            mode=serving.mode,
            generation=serving.generation.number,
            deliver=self._answers.deliver,
            observe=self._observe,
            second=self._second.decoding if self._second else None,
        )
        self._loop.start()
        self._residency.serve(serving.generation)
        try:
            await self._residency.attach(self._loop, cache)
        except BaseException:
            await asyncio.to_thread(self._loop.stop)
            raise

    def _allocate_cache(self, graph: Graph) -> KVCache:
        wanted, block = self._config.kv_cache_bytes, graph.cache_block_bytes
        if wanted < block:
            raise FailedPreconditionError("kv_cache_bytes", f"must be at least {block}: one cache block of this model")
        memory.require(wanted, "the KV cache")
        return graph.allocate_cache(wanted // block)

    async def _settle(self) -> None:
        if self._second:
            await asyncio.to_thread(self._second.save_times)

    # Requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StepOutput, None]:
        """The outputs of one request; the last has `finish` set. Closing the generator early cancels the request.

        A mode of its own that is not resident is made so first. Failures are raised as DskdError.
        """
        with self._answers.open(request.request_id) as outputs:
            ended = False
            try:
                await self._submit(request)
                while not ended:
                    output = await outputs.get()
                    ended = output.is_last
                    if output.error is not None:
                        raise output.error
                    yield output
            finally:
                if not ended:
                    self._loop.cancel(request.request_id)
                self._monitor.forget(request.request_id)

    async def _submit(self, request: GenerationRequest) -> None:
        await self._transitions.settled()
        self._transitions.require_open()
        now = self._transitions.serving
        mode = request.precision or now.mode
        with self._residency.holding(now.generation, [mode]):
            await self._residency.ensure(now.generation, mode)
            await asyncio.wrap_future(self._loop.submit(request))

    # Display

    def _second_state(self, generation: ServedGeneration) -> SecondEngineState | None:
        if self._slot_engine is None:
            return None
        found = ((mode, self._residency.slots_of(generation, mode)) for mode in LADDER)
        return SecondEngineState(
            self._slot_engine.name,
            self._config.engine,
            self._without_second,
            self._second.cache.num_slots if self._second else 0,
            tuple(SecondGraphState(mode, slots.nbytes, slots.reason) for mode, slots in found if slots),
            self._second.times.known if self._second else {},
        )
