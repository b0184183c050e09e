"""What the managers of all models have in common: what serves a model, and how that changes."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from dskd import memory
from dskd.config import ModelConfig
from dskd.engine.request import InFlight, LoopSnapshot, Observation
from dskd.errors import EXPECTED_ERRORS, FailedPreconditionError
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.journal import Journal
from dskd.manager.monitored import ManagedModel
from dskd.manager.parts import ModelBuilder, ModelCatalogue, ModelLoop, ServedGeneration
from dskd.manager.residency import Residency, Retention
from dskd.manager.start import StartingPoint, starting_points
from dskd.manager.state_file import KeptGeneration, read_committed
from dskd.manager.transitions import Plan, Serving, Transitions, kept_now
from dskd.manager.types import (
    Change,
    ChangeReport,
    GenerationState,
    HistoryEntry,
    ManagerSnapshot,
    ModeState,
    SecondEngineState,
    SwitchReport,
)
from dskd.monitor.config import MonitorConfig
from dskd.monitor.metrics import EventMetrics
from dskd.monitor.monitor import NoiseMonitor
from dskd.monitor.states import NoiseMeasure
from dskd.monitor.types import NoiseSnapshot
from dskd.quant_config import overridden
from dskd.typed_toml import ConfigError
from dskquant.errors import QuantError
from dskquant.modes import LADDER, PrecisionMode

STATE = "state.json"
SETS = "sets"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """What serves one model is made of."""

    engine: str
    catalogue: ModelCatalogue
    builder: ModelBuilder
    proofs_are_absolute: bool  # graphs are proven against the reference, and not against a stand-in for it
    close: Callable[[], None] = lambda: None  # lets go of what they hold; nothing may be under way any more


class ModelManager(ABC):
    """Owns the generations of a model. All methods belong to the asyncio thread.

    A change never costs a request: what is new is built and proven beside the old, then the loop flips one reference
    between two steps. Whatever fails on the way leaves the old serving.
    """

    measure: NoiseMeasure
    _loop: ModelLoop
    _kv_cache_bytes = 0

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        state_dir: Path,
        events: EventBus,
        history: History,
        monitor: MonitorConfig | None,
        metrics: EventMetrics | None,
        require_state_dir: Callable[[], None],
    ) -> None:
        """`state_dir` is the model's own: its committed state and the parameter sets it may serve are kept there.

        `require_state_dir` raises an OSError when nothing that is written there would be found again.
        """
        self._require_state_dir = require_state_dir
        self._name = name
        self._config = config
        self._monitor_base = config.monitor or monitor or MonitorConfig()
        self._metrics = metrics
        self._state_dir = state_dir
        self._events = events
        self._journal = Journal(name, events, history)
        self._log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger().bind(model=name)
        self._background: set[asyncio.Task[Any]] = set()

    # Life

    @abstractmethod
    async def _prepare(self) -> Parts:
        """Reads what lies on disk. Raises DskdError or QuantError."""

    @abstractmethod
    async def _start_loop(self, serving: Serving) -> None:
        """Starts `_loop` with the graphs in memory; leaves nothing behind when it raises."""

    @abstractmethod
    def _second_state(self, generation: ServedGeneration) -> SecondEngineState | None:
        """For display: the engine beside the first one; None: none is wanted."""

    async def _settle(self) -> None:  # noqa: B027  # most have nothing to keep
        """Keeps what is to outlive the loop, which has stopped."""

    async def start(self) -> None:
        """Builds and proves the resident modes, then serves. What it raises is a DskdError or QuantError."""
        parts = self._parts = await self._prepare()
        self._residency = Residency(self._name, parts.builder, self._events)
        try:
            serving, last_number = await self._start_with_the_best(parts.catalogue)
            await self._start_loop(serving)
        except BaseException:
            await asyncio.to_thread(self._residency.close)
            parts.close()
            raise
        self._transitions = Transitions(
            self._name,
            self._config,
            parts.catalogue,
            parts.builder,
            self._residency,
            self._loop,
            self._state_dir / STATE,
            self._journal,
            serving,
            last_number,
            self._follow,
            self._check_monitor,
            self._require_state_dir,
            self.measure,
        )
        self._start_monitor(parts.proofs_are_absolute)
        retention = Retention(self._config.resident, self._config.on_demand_ttl_s, self._config.keep_previous_s)
        self._spawn(self._residency.release_unused(retention))

    def _start_monitor(self, proofs_are_absolute: bool) -> None:
        target = ManagedModel(self._transitions, self._residency, self._loop, self._journal, proofs_are_absolute)
        self._monitored_by = self._monitor_config()
        self._monitor = NoiseMonitor(
            self._name, self._monitored_by, target, metrics=self._metrics, measure=self.measure
        )
        self._asyncio = asyncio.get_running_loop()
        self._monitoring = asyncio.create_task(self._monitor.run(), name=f"monitor {self._name}")

    def _monitor_config(self) -> MonitorConfig:
        """What the configuration says, and over it what quant configs say."""
        table = self._transitions.serving.monitor
        return overridden(self._monitor_base, json.loads(table)) if table else self._monitor_base

    def _check_monitor(self, table: Mapping[str, Any]) -> None:
        try:
            overridden(self._monitor_base, table)
        except ConfigError as error:
            raise FailedPreconditionError("monitor", str(error)) from error

    def _follow(self) -> None:
        """Something was committed."""
        config = self._monitor_config()
        if config != self._monitored_by:
            self._monitored_by = config
            self._monitor.configure(config)
        self._monitor.renew()

    def _observe(self, observations: list[Observation]) -> None:
        """What the loop measures, on its thread or the one beside it."""
        self._asyncio.call_soon_threadsafe(self._monitor.observe, observations)

    async def _start_with_the_best(self, catalogue: ModelCatalogue) -> tuple[Serving, int]:
        """Builds what was committed last; what stands in its way is told loudly, and the next best one serves."""
        states = await asyncio.to_thread(read_committed, self._state_dir / STATE)
        if states and states[0].change:
            self._journal.recover(states[0].change)
        *committed, last_resort = starting_points(states, self._config.default_mode)
        for point in committed:
            try:
                return await self._start_with(point, catalogue)
            except (QuantError, FailedPreconditionError) as error:  # noqa: PERF203
                self._tell_lost(point, str(error))
        return await self._start_with(last_resort, catalogue)

    async def _start_with(self, point: StartingPoint, catalogue: ModelCatalogue) -> tuple[Serving, int]:
        generation, last_number = await asyncio.to_thread(_generation_of, point, catalogue)
        await self._residency.build_first(generation, self._config.resident)
        mode = await self._bring_back(generation, point.mode)
        others = [kept for kept in point.kept if kept.number != generation.number]
        kept = (kept_now(generation, self._residency), *others)[: self._config.keep_generations]
        pinned = point.pinned and mode is point.mode
        return Serving(generation, mode, kept, pinned, point.monitor), last_number

    async def _bring_back(self, generation: ServedGeneration, committed: PrecisionMode) -> PrecisionMode:
        """Builds the committed mode; when that cannot be, the default mode serves instead."""
        try:
            await self._residency.build_first(generation, [committed])
        except EXPECTED_ERRORS as error:
            reason = f"committed mode lost: starting in the default mode: {error}"
            self._note_recovery(replace(self._recovery(reason), to_mode=committed, generation=generation.number))
            return self._config.default_mode
        return committed

    def _tell_lost(self, point: StartingPoint, reason: str) -> None:
        number, found = (point.generation.number, point.generation.parameter_set) if point.generation else (0, "")
        reason = f"committed generation lost: starting with the one before: {reason}"
        self._note_recovery(replace(self._recovery(reason), to_mode=point.mode, generation=number, parameter_set=found))

    def _recovery(self, reason: str) -> HistoryEntry:
        return HistoryEntry(self._name, "recover", "daemon", "rejected", reason)

    def _note_recovery(self, entry: HistoryEntry) -> None:
        self._log.error("what was committed cannot serve", generation=entry.generation, reason=entry.reason)
        self._journal.note(entry)

    async def close(self, grace_s: float) -> int:
        """Refuses new requests, lets open ones finish within `grace_s` seconds, frees all; returns the aborted.

        A build under way cannot be stopped and is waited for; the switch it was for is refused then.
        """
        self._transitions.close()
        aborted = await asyncio.wrap_future(self._loop.drain(grace_s))
        self._monitoring.cancel()
        await asyncio.wait([self._monitoring])
        self._monitor.close()
        await self._residency.settle()
        while self._background:
            await asyncio.wait(self._background)
        await asyncio.to_thread(self._transitions.close_threads)
        await asyncio.to_thread(self._loop.stop)
        await self._settle()
        await asyncio.to_thread(self._residency.close)
        self._parts.close()
        await asyncio.to_thread(memory.collect_garbage)  # the parts of a manager refer to each other
        memory.give_back()
        return aborted

    # Changes

    async def switch(
        self, mode: PrecisionMode, in_flight: InFlight, actor: str, wait: bool, pin: bool = False
    ) -> SwitchReport:
        """Makes `mode` the one that serves; if it is not resident it is prepared first, while the old one serves on.

        `pin` keeps it whatever the noise monitor says, until the next switch.

        A switch goes on when its caller goes away. Without `wait`, one that needs preparation is reported as not done.
        Raises FailedPreconditionError when it fails its proof or is overtaken by a later switch, ResourceExhaustedError
        when memory is short, UnavailableError while the model is being unloaded; the old mode serves on.
        """
        now = self._transitions.serving
        resident = self._residency.has(now.generation, mode)
        plan = self._transitions.plan("switch", Change(mode, in_flight=in_flight), actor, pin=pin)
        report = await self._enter(plan, wait or resident)
        commit_ms = report.phases_ms.get("commit", 0.0)
        prepare_ms = 0.0 if resident else report.total_ms - commit_ms
        return SwitchReport(
            report.from_mode,
            report.to_mode,
            report.to_generation,
            resident,
            report.done,
            report.flip_us,
            prepare_ms if report.done else 0.0,
            report.total_ms if report.done else 0.0,
        )

    async def apply(self, change: Change, actor: str, *, dry_run: bool, wait: bool) -> ChangeReport:
        """Makes `change`: builds and proves what it asks for beside what serves, commits it, flips between two steps.

        A change goes on when its caller goes away; without `wait` it is answered once it is validated. `dry_run` stops
        there. Raises QuantError for a parameter set or layer rule that is no good, FailedPreconditionError when the
        proof fails or a later change overtakes it, ResourceExhaustedError when memory or disk is short,
        UnavailableError while the model is being unloaded; what served serves on.
        """
        plan = self._transitions.plan("apply", change, actor)
        return await (self._transitions.try_out(plan) if dry_run else self._enter(plan, wait))

    async def rollback(self, generation: int | None, in_flight: InFlight, actor: str, wait: bool) -> ChangeReport:
        """Returns to a kept generation (None: the one that served before), at once if its graphs are in memory.

        Raises InvalidArgumentError for one that is not kept, FailedPreconditionError if there is none, and what `apply`
        raises.
        """
        kept = self._transitions.kept(generation)
        return await self._enter(self._transitions.plan("rollback", Change(in_flight=in_flight), actor, kept), wait)

    async def _enter(self, plan: Plan, wait: bool) -> ChangeReport:
        """Carries `plan` out in a task of its own; without `wait`, returns when it is validated."""
        validated: asyncio.Future[ChangeReport] = asyncio.get_running_loop().create_future()
        self._transitions.enter(plan)
        work = self._spawn(self._transitions.carry_out(plan, validated.set_result))
        if not wait:
            await asyncio.wait({work, validated}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return validated.result()
        return await asyncio.shield(work)

    # Display

    def noise(self, samples: int) -> NoiseSnapshot:
        """What the noise monitor knows, with the latest `samples` scored tokens of each mode."""
        return self._monitor.snapshot(samples)

    def snapshot(self) -> ManagerSnapshot:
        """State for display."""
        loop, now = self._loop.snapshot(), self._transitions.serving
        return ManagerSnapshot(
            engine=self._parts.engine,
            mode=now.mode,
            generation=now.generation.number,
            hash=now.generation.hash,
            parameter_set=now.generation.parameters.hash,
            generations=tuple(self._generation_state(kept, now) for kept in now.kept),
            modes=tuple(self._mode_state(mode, now.generation, loop) for mode in LADDER),
            loop=loop,
            kv_cache_bytes=self._kv_cache_bytes,
            change_in_progress=", ".join(f"preparing {name}" for name in self._residency.in_preparation),
            second=self._second_state(now.generation),
            measure=self.measure,
        )

    def _generation_state(self, kept: KeptGeneration, now: Serving) -> GenerationState:
        return GenerationState(
            kept.number,
            kept.hash,
            kept.parameter_set,
            kept.committed,
            active=kept.number == now.generation.number,
            resident=self._residency.holds_generation(kept.number),
            kl=kept.kl,
        )

    def _mode_state(self, mode: PrecisionMode, generation: ServedGeneration, loop: LoopSnapshot) -> ModeState:
        return ModeState(
            mode,
            self._residency.has(generation, mode),
            self._residency.bytes_of(generation, mode),
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


def _generation_of(point: StartingPoint, catalogue: ModelCatalogue) -> tuple[ServedGeneration, int]:
    """The generation to start with, and the last number there ever was. Raises QuantError when its set is damaged.

    What the configuration makes another one of (another group of activations, say) gets a number of its own.
    """
    number = point.last_number + 1
    if point.generation is None:
        return catalogue.generation(number, catalogue.default, ()), number
    generation = catalogue.reopen(point.generation)
    if generation.hash == point.generation.hash:
        return generation, point.last_number
    return catalogue.generation(number, generation.parameters, generation.layers), number
