"""The QuantizerManager of one model: what serves it, and how that changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from dskd import memory
from dskd.config import ModelConfig, SchedulerConfig
from dskd.engine.request import FlipReport, GenerationRequest, InFlight, LoopSnapshot, StepOutput
from dskd.engine.step_loop import StepLoop
from dskd.errors import EXPECTED_ERRORS, FailedPreconditionError, UnavailableError
from dskd.manager.answers import AnswerQueues
from dskd.manager.build import Builder
from dskd.manager.events import EventBus
from dskd.manager.generation import Generation
from dskd.manager.history import History
from dskd.manager.proof import Prover
from dskd.manager.residency import Residency
from dskd.manager.state_file import Committed, committed_mode
from dskd.manager.types import HistoryEntry, ManagerSnapshot, ModeState, SwitchReport
from dskquant import golden, parameter_set
from dskquant.engines.protocol import CompileOptions, Engine, Graph, KVCache
from dskquant.errors import StoreError
from dskquant.modes import LADDER, PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.store import DEFAULT_PARAMETER_SET, StoreManifest, verify

FIRST_GENERATION = 1

T = TypeVar("T")


class QuantizerManager:
    """Owns the generation of a model. All methods belong to the asyncio thread.

    A change never costs a request: what is new is built and proven beside the old, then the step loop flips one
    reference between two steps. Whatever fails on the way leaves the old serving.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        scheduler: SchedulerConfig,
        engine: Engine,
        state_file: Path,
        events: EventBus,
        history: History,
    ) -> None:
        self._name = name
        self._config = config
        self._scheduler = scheduler
        self._engine = engine
        self._state_file = state_file
        self._events = events
        self._history = history
        self._log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger().bind(model=name)
        self._commit_lock = asyncio.Lock()
        self._last_ticket = 0  # of the switches asked for, in their order
        self._committed_ticket = 0
        self._background: set[asyncio.Task[Any]] = set()
        self._closing = False

    # Life

    async def start(self) -> None:
        """Builds and proves the resident modes, then serves. What it raises is a DskdError or QuantError."""
        store, config = self._config.path, self._config
        parameters = await asyncio.to_thread(_verified_parameters, store)
        prompts = await asyncio.to_thread(golden.read, store)
        options = CompileOptions(config.threads, config.kv_precision, config.activation_group, config.weights)
        builder = Builder(self._engine, store, options, Prover(prompts, self._engine, config.proof))
        self._generation = Generation.of(FIRST_GENERATION, parameters, self._engine.name, options)
        self._residency = Residency(self._name, builder, self._generation.number, self._events)
        self._mode = config.default_mode
        try:
            graph = await self._residency.build_first(config.resident)
            await self._bring_back(self._starting_mode())
            await self._start_loop(await asyncio.to_thread(self._allocate_cache, graph))
        except BaseException:
            await asyncio.to_thread(self._residency.close)
            raise
        self._spawn(self._residency.release_unused(config.resident, config.on_demand_ttl_s))

    def _starting_mode(self) -> PrecisionMode:
        default = self._config.default_mode
        try:
            return committed_mode(self._state_file, default)
        except (OSError, ValueError) as error:
            self._log.error(
                "damaged state file: starting in the default mode", path=str(self._state_file), reason=str(error)
            )
            return default

    async def _bring_back(self, committed: PrecisionMode) -> None:
        """Makes the committed mode the one that serves; when it cannot be built, the default mode serves instead."""
        try:
            if not self._residency.has(committed):
                await self._residency.build_first([committed])
        except EXPECTED_ERRORS as error:
            self._log.error(
                "committed mode lost: starting in the default mode", mode=committed.value, reason=str(error)
            )
            self._note(replace(self._entry(committed, None, "daemon"), outcome="rejected", reason=str(error)))
        else:
            self._mode = committed

    def _allocate_cache(self, graph: Graph) -> KVCache:
        wanted, block = self._config.kv_cache_bytes, graph.cache_block_bytes
        if wanted < block:
            raise FailedPreconditionError("kv_cache_bytes", f"must be at least {block}: one cache block of this model")
        memory.require(wanted, "the KV cache")
        return graph.allocate_cache(wanted // block)

    async def _start_loop(self, cache: KVCache) -> None:
        self._answers = AnswerQueues()
        self._kv_cache_bytes = cache.nbytes
        self._loop = StepLoop(
            model=self._name,
            engine_name=self._engine.name,
            cache=cache,
            config=self._scheduler,
            mode=self._mode,
            generation=self._generation.number,
            deliver=self._answers.deliver,
        )
        self._loop.start()
        try:
            await self._residency.attach(self._loop, cache)
        except BaseException:
            await asyncio.to_thread(self._loop.stop)
            raise

    async def close(self, grace_s: float) -> int:
        """Refuses new requests, lets open ones finish within `grace_s` seconds, frees all; returns the aborted.

        A build under way cannot be stopped and is waited for; the switch it was for is refused then.
        """
        self._closing = True
        aborted = await asyncio.wrap_future(self._loop.drain(grace_s))
        await self._residency.settle()
        while self._background:
            await asyncio.wait(self._background)
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._residency.close)
        memory.give_back()
        return aborted

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

    async def _submit(self, request: GenerationRequest) -> None:
        self._require_open()
        mode = request.precision or self._mode
        with self._residency.holding(mode):
            await self._residency.ensure(mode)
            await asyncio.wrap_future(self._loop.submit(request))

    # Changes

    async def switch(self, mode: PrecisionMode, in_flight: InFlight, actor: str, wait: bool) -> SwitchReport:
        """Makes `mode` the one that serves; if it is not resident it is prepared first, while the old one serves on.

        A switch goes on when its caller goes away. Without `wait`, one that needs preparation is reported as not done.
        Raises FailedPreconditionError when it fails its proof or is overtaken by a later switch, ResourceExhaustedError
        when memory is short, UnavailableError while the model is being unloaded; the old mode serves on.
        """
        self._last_ticket += 1
        resident = self._residency.has(mode)
        switch = self._spawn(self._switch(self._last_ticket, mode, in_flight, actor))
        if wait or resident:
            return await asyncio.shield(switch)
        return SwitchReport(self._mode, mode, self._generation.number, False, False, 0.0, 0.0, 0.0)

    async def _switch(self, ticket: int, mode: PrecisionMode, in_flight: InFlight, actor: str) -> SwitchReport:
        began = time.perf_counter()
        entry = self._entry(mode, in_flight, actor)
        resident = self._residency.has(mode)
        try:
            self._require_open()
            with self._residency.holding(mode):
                phases = await self._residency.ensure(mode)
                prepared = time.perf_counter()
                flip = await self._commit(ticket, mode, in_flight)
        except EXPECTED_ERRORS as error:
            self._note(replace(entry, outcome="rejected", reason=str(error)))
            raise
        ended = time.perf_counter()
        phases["commit"] = (ended - prepared) * 1e3
        self._note(replace(entry, from_mode=flip.from_mode, flip_us=flip.microseconds, phases_ms=phases))
        prepare_ms = 0.0 if resident else (prepared - began) * 1e3
        total_ms = (ended - began) * 1e3
        return SwitchReport(
            flip.from_mode, mode, flip.generation, resident, True, flip.microseconds, prepare_ms, total_ms
        )

    async def _commit(self, ticket: int, mode: PrecisionMode, in_flight: InFlight) -> FlipReport:
        """Makes the switch durable, then flips. One at a time."""
        async with self._commit_lock:
            self._require_open()
            if ticket < self._committed_ticket:
                raise FailedPreconditionError(mode.value, f"overtaken by a later switch to {self._mode.value}")
            state = Committed(mode.value, self._config.default_mode.value, self._generation.hash)
            try:
                await asyncio.to_thread(state.write, self._state_file)
            except OSError as error:
                raise FailedPreconditionError("state_dir", f"the switch cannot be made durable: {error}") from error
            flip = await asyncio.wrap_future(self._loop.flip(mode, self._generation.number, in_flight))
            self._mode, self._committed_ticket = mode, ticket
            return flip

    def _require_open(self) -> None:
        if self._closing:
            raise UnavailableError("the model is being unloaded")

    def _entry(self, mode: PrecisionMode, in_flight: InFlight | None, actor: str) -> HistoryEntry:
        generation = self._generation
        return HistoryEntry(
            self._name,
            "switch",
            actor,
            "committed",
            from_mode=self._mode,
            to_mode=mode,
            generation=generation.number,
            hash=generation.hash,
            in_flight=in_flight,
        )

    def _note(self, entry: HistoryEntry) -> None:
        """Tells history, listeners and log how a switch ended."""
        entry = self._history.append(entry)
        modes = {"from": _value(entry.from_mode), "to": _value(entry.to_mode)}
        message = f"{modes['from']} -> {modes['to']} {entry.outcome}" + (f": {entry.reason}" if entry.reason else "")
        figures = {"generation": entry.generation, "flip_us": entry.flip_us, "phases_ms": entry.phases_ms}
        self._events.publish(f"switch.{entry.outcome}", self._name, message, actor=entry.actor, **modes, **figures)
        self._log.info(f"switch {entry.outcome}", reason=entry.reason, actor=entry.actor, **modes, **figures)

    # Display

    def snapshot(self) -> ManagerSnapshot:
        """State for display."""
        loop = self._loop.snapshot()
        return ManagerSnapshot(
            engine=self._engine.name,
            mode=self._mode,
            generation=self._generation.number,
            hash=self._generation.hash,
            modes=tuple(self._mode_state(mode, loop) for mode in LADDER),
            loop=loop,
            kv_cache_bytes=self._kv_cache_bytes,
            change_in_progress=", ".join(f"preparing {name}" for name in self._residency.in_preparation),
        )

    def _mode_state(self, mode: PrecisionMode, loop: LoopSnapshot) -> ModeState:
        return ModeState(
            mode,
            self._residency.has(mode),
            self._residency.bytes_of(mode),
            loop.tokens_by_mode.get(mode, 0),
            loop.requests_by_mode.get(mode, 0),
        )

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs `work` as a task that outlives its caller."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(self._log_unexpected)
        return task

    def _log_unexpected(self, task: asyncio.Task[Any]) -> None:
        """A refusal is in the history already; anything else must not get lost with a caller that has gone."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EXPECTED_ERRORS):
            self._log.error("background work failed", exc_info=error)


def _verified_parameters(store: Path) -> ParameterSet:
    """The parameter set of `store`. Raises StoreError when one of the two is damaged, or not made for the other."""
    manifest = StoreManifest.read(store)
    verify(store, manifest)
    parameters = parameter_set.read(store / DEFAULT_PARAMETER_SET)
    if parameters.weights_sha256 != manifest.weights_sha256:
        raise StoreError(f"{parameters.directory}: made for other weights than those of {store}")
    parameters.verify()
    return parameters


def _value(mode: PrecisionMode | None) -> str:
    return mode.value if mode else ""
