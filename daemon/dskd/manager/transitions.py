"""How what serves a model changes: validated, built and proven beside it, made durable, flipped between two steps.

A change is made as a whole or refused as a whole; until its flip nothing of what serves is touched. The one exception
is the swap policy "resource": there the old graphs make room for the new ones while the step loop is suspended, and
come back if the new ones are refused.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dskd.config import ModelConfig, SwapPolicy
from dskd.engine.request import FlipReport, InFlight
from dskd.errors import EXPECTED_ERRORS, FailedPreconditionError, InvalidArgumentError, UnavailableError
from dskd.manager.depot import KeepCancelledError
from dskd.manager.journal import Journal
from dskd.manager.parts import ModelBuilder, ModelCatalogue, ModelLoop, Overtaking, ServedGeneration, ServedSet
from dskd.manager.residency import Residency
from dskd.manager.state_file import Committed, KeptGeneration
from dskd.manager.types import Change, ChangeReport, HistoryEntry, ModeProof
from dskd.monitor.states import NoiseMeasure
from dskd.priority import lower_priority
from dskquant.modes import LADDER, QUANTIZED, PrecisionMode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves, and the generations that a rollback can return to, it included; the last committed first."""

    generation: ServedGeneration
    mode: PrecisionMode
    kept: tuple[KeptGeneration, ...]
    pinned: bool = False  # the mode, by an operator: whatever the noise monitor says
    monitor: str = ""  # what quant configs say of the noise monitor: a JSON object


@dataclass(slots=True)
class Plan:
    """A change on its way."""

    change: Change
    entry: HistoryEntry
    returns_to: KeptGeneration | None = None  # a rollback
    pin: bool = False  # the mode it asks for
    mode_ticket: int = 0  # its place in the order in which modes were asked for
    overtaking: Overtaking = field(default_factory=Overtaking)
    set_hash: str = ""  # of the parameter set that it needs, from before that is kept in the depot
    target: ServedGeneration | None = None  # set when it is validated; a mere switch of the mode has none
    phases_ms: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @property
    def is_swap(self) -> bool:
        """Whether it asks for another generation, and not for another mode alone."""
        return self.returns_to is not None or self.change.parameters is not None or self.change.layers is not None

    def spend(self, phases_ms: dict[str, float]) -> None:
        """Adds to the time it took."""
        for phase, spent in phases_ms.items():
            self.phases_ms[phase] = self.phases_ms.get(phase, 0.0) + spent


class Transitions:
    """The changes of one model. Belongs to the asyncio thread."""

    def __init__(
        self,
        model: str,
        config: ModelConfig,
        catalogue: ModelCatalogue,
        builder: ModelBuilder,
        residency: Residency,
        loop: ModelLoop,
        state_file: Path,
        journal: Journal,
        serving: Serving,
        last_number: int,
        on_commit: Callable[[], None],
        check_monitor: Callable[[Mapping[str, Any]], None],
        require_state_dir: Callable[[], None],
        measure: NoiseMeasure,
    ) -> None:
        """`on_commit` is called when `serving` has changed.

        `check_monitor` raises FailedPreconditionError for a `[monitor]` table that does not fit the configuration,
        `require_state_dir` an OSError when the state directory is not ours any more.
        """
        self.serving = serving
        self._on_commit = on_commit
        self._check_monitor = check_monitor
        self._require_state_dir = require_state_dir
        self._measure = measure
        self._model = model
        self._config = config
        self._catalogue = catalogue
        self._builder = builder
        self._residency = residency
        self._loop = loop
        self._state_file = state_file
        self._journal = journal
        self._last_number = last_number  # of all generations there ever were
        self._reader = ThreadPoolExecutor(1, f"read-{model}", lower_priority)
        self._writer = ThreadPoolExecutor(1, f"commit-{model}")  # a commit waits for nobody else's work
        self._commit_lock = asyncio.Lock()
        self._not_in_place = asyncio.Event()  # no swap in place is under way
        self._not_in_place.set()
        self._last_mode_ticket = 0
        self._committed_mode_ticket = 0
        self._newest_swap: Plan | None = None  # not committed yet
        self._is_closed = False

    def close(self) -> None:
        """Refuses what is not committed yet."""
        self._is_closed = True
        if self._newest_swap:
            self._newest_swap.overtaking.overtake("the unloading of the model")

    def close_threads(self) -> None:
        """No change may be under way any more."""
        self._reader.shutdown()
        self._writer.shutdown()

    @staticmethod
    async def _run_in(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    def require_open(self) -> None:
        """Raises UnavailableError when the model is being unloaded."""
        if self._is_closed:
            raise UnavailableError("the model is being unloaded")

    async def settled(self) -> None:
        """Waits while the old graphs make room for new ones: what is built meanwhile would take that room."""
        await self._not_in_place.wait()

    # Asked for

    def plan(
        self, kind: str, change: Change, actor: str, returns_to: KeptGeneration | None = None, pin: bool = False
    ) -> Plan:
        """A change that is not asked for yet: see `try_out` and `enter`."""
        now = self.serving
        entry = HistoryEntry(
            self._model,
            kind,
            actor,
            "committed",
            from_mode=now.mode,
            to_mode=change.mode or now.mode,
            from_generation=now.generation.number,
            in_flight=change.in_flight,
        )
        return Plan(change, entry, returns_to, pin)

    def kept(self, number: int | None) -> KeptGeneration:
        """The kept generation of that number; None: the one that served before the present one.

        Raises InvalidArgumentError with the known ones, FailedPreconditionError if there is none to return to.
        """
        known = {kept.number: kept for kept in self.serving.kept}
        if number is None:
            others = [kept for kept in known.values() if kept.number != self.serving.generation.number]
            if not others:
                raise FailedPreconditionError("generation", "there is no earlier generation to return to")
            return others[0]
        if number not in known:
            raise InvalidArgumentError("generation", f"{number} is not kept; kept: {', '.join(map(str, known))}")
        return known[number]

    async def try_out(self, plan: Plan) -> ChangeReport:
        """Validates `plan` and changes nothing. Raises what `carry_out` raises before it builds anything."""
        self.require_open()
        await self._resolve(plan, lambda found: found, lambda: self._last_number + 1)
        target = plan.target or self.serving.generation
        missing = [mode for mode in self._needed(plan) if not self._residency.has(target, mode)]
        self._builder.require_memory({self._builder.graph_key(mode) for mode in missing})
        return self._report(plan)

    def enter(self, plan: Plan) -> None:
        """Gives `plan` its place in the order of all changes; a swap overtakes the one that is on its way."""
        if plan.change.mode is not None:
            self._last_mode_ticket += 1
            plan.mode_ticket = self._last_mode_ticket
        if plan.is_swap:
            if self._newest_swap is not None:
                self._newest_swap.overtaking.overtake("a later change")
            self._newest_swap = plan

    async def carry_out(self, plan: Plan, on_validated: Callable[[ChangeReport], None]) -> ChangeReport:
        """Makes the change that was entered, and notes how it ended.

        `on_validated` is told what it will be before it is built. Raises QuantError for a set or a rule that is no
        good, FailedPreconditionError when a proof fails, it is overtaken, or cannot be made durable,
        ResourceExhaustedError when memory or disk is short, UnavailableError while the model is being unloaded.
        """
        try:
            self.require_open()
            await self._validate(plan)
            if plan.entry.kind != "switch" and self._is_served(plan):
                return replace(self._report(plan), done=True)
            on_validated(self._report(plan))
            return await (self._swap_in_place(plan) if self._goes_in_place(plan) else self._change_beside(plan))
        except EXPECTED_ERRORS as error:
            self._journal.note(replace(self._entry(plan), outcome="rejected", reason=str(error)))
            raise
        except Exception:
            self._journal.note(replace(self._entry(plan), outcome="rejected", reason="internal error: see the log"))
            raise
        finally:
            if self._newest_swap is plan:
                self._newest_swap = None

    # Validated

    async def _validate(self, plan: Plan) -> None:
        began = time.perf_counter()
        try:
            await self._resolve(
                plan, lambda found: self._catalogue.keep(found, plan.overtaking.happened), self._next_number
            )
        except KeepCancelledError:
            plan.overtaking.check()
            raise
        plan.overtaking.check()
        if plan.is_swap:
            plan.spend({"validate": _ms_since(began)})

    async def _resolve(
        self, plan: Plan, keep: Callable[[ServedSet], ServedSet], next_number: Callable[[], int]
    ) -> None:
        """Finds the generation that `plan` asks for."""
        if plan.change.monitor:
            self._check_monitor(plan.change.monitor)
        if plan.is_swap:
            find = partial(self._find_target, plan, keep, next_number)
            plan.target = await self._run_in(self._reader, find)

    def _find_target(
        self, plan: Plan, keep: Callable[[ServedSet], ServedSet], next_number: Callable[[], int]
    ) -> ServedGeneration:
        """Reads and checks whole parameter sets."""
        if plan.returns_to is not None:
            plan.set_hash = plan.returns_to.parameter_set
            return self._catalogue.reopen(plan.returns_to)
        now, change = self.serving.generation, plan.change
        layers = now.layers if change.layers is None else change.layers
        wanted, check = change.parameters, plan.overtaking.check
        parameters = now.parameters if wanted is None else self._catalogue.find(wanted, check)
        plan.set_hash = parameters.hash
        target = self._catalogue.generation(0, parameters, layers)  # the rules are checked before it is kept
        numbers = {kept.hash: kept.number for kept in self.serving.kept}
        number = numbers.get(target.hash) or next_number()
        kept = parameters if wanted is None else keep(parameters)
        return self._catalogue.generation(number, kept, layers)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _is_served(self, plan: Plan) -> bool:
        same_mode = plan.change.mode in (None, self.serving.mode)
        same_monitor = self._monitor_of(plan) == self.serving.monitor
        same_weights = plan.target is None or plan.target.hash == self.serving.generation.hash
        return same_mode and same_monitor and same_weights

    # Built

    def _needed(self, plan: Plan) -> list[PrecisionMode]:
        """The modes that must be in memory before `plan` may take effect."""
        if not plan.is_swap:
            return [plan.change.mode or self.serving.mode]
        requests = self._loop.snapshot().requests_by_mode
        in_memory = self._residency.modes_in_memory(self.serving.generation)
        wanted = {plan.change.mode or self.serving.mode, *self._config.resident}
        # the source weights serve every generation; quantized modes are built anew only where somebody waits for them
        wanted |= {mode for mode in in_memory if mode not in QUANTIZED or requests.get(mode)}
        return [mode for mode in LADDER if mode in wanted]

    def _goes_in_place(self, plan: Plan) -> bool:
        is_other = plan.target is not None and plan.target.hash != self.serving.generation.hash
        return is_other and self._config.swap is SwapPolicy.RESOURCE

    async def _change_beside(self, plan: Plan) -> ChangeReport:
        """Builds what is needed while the old serves on."""
        await self.settled()
        target, modes = plan.target or self.serving.generation, self._needed(plan)
        with self._residency.holding(target, modes):
            for mode in modes:
                plan.spend(await self._residency.ensure(target, mode, plan.overtaking))
            async with self._commit_lock:
                return await self._commit(plan)

    async def _swap_in_place(self, plan: Plan) -> ChangeReport:
        """Releases the old graphs, builds the new ones, and brings the old ones back if that fails."""
        if plan.change.in_flight is InFlight.FINISH:
            raise FailedPreconditionError(
                "in_flight", 'with swap = "resource" open requests cannot finish on the old weights; use "migrate"'
            )
        async with self._commit_lock:
            plan.overtaking.check()
            old = self.serving.generation
            evicted = self._residency.modes_in_memory(old) & QUANTIZED
            self._require_room(plan, evicted)
            self._not_in_place.clear()
            try:
                await self._residency.evict(old, evicted)
                for mode in self._needed(plan):
                    plan.spend(await self._residency.ensure(plan.target or old, mode, plan.overtaking))
                return await self._commit(plan)
            except BaseException:
                await self._bring_back(old, evicted)
                raise
            finally:
                self._not_in_place.set()
                await asyncio.wrap_future(self._loop.resume())

    def _require_room(self, plan: Plan, evicted: frozenset[PrecisionMode]) -> None:
        old = self.serving.generation
        key = self._builder.graph_key
        given_back = {key(mode): self._residency.bytes_of(old, mode) for mode in evicted}
        self._builder.require_memory({key(mode) for mode in evicted}, sum(given_back.values()))

    async def _bring_back(self, old: ServedGeneration, modes: frozenset[PrecisionMode]) -> None:
        if self._is_closed:
            return
        try:
            for mode in modes:
                await self._residency.ensure(old, mode)
        except EXPECTED_ERRORS as error:
            self._journal.log.error("the old graphs did not come back", generation=old.number, reason=str(error))

    # Committed

    async def _commit(self, plan: Plan) -> ChangeReport:
        """Makes the change durable, then flips; one at a time, under the commit lock."""
        self.require_open()
        plan.overtaking.check()
        began, mode, generation = time.perf_counter(), self._mode_of(plan), plan.target or self.serving.generation
        if self._must_not_worsen(plan):
            self._builder.prover.judge_change(self._kl_now(), self._residency.proofs(generation).values())
        with self._residency.holding(generation, [mode]):
            await self._residency.ensure(generation, mode)  # another change may have been committed meanwhile
            entry = self._entry(plan, mode, generation)
            kept = self._kept_with(generation) if plan.is_swap else self.serving.kept
            pinned = self.serving.pinned if plan.change.mode is None else plan.pin and mode is plan.change.mode
            serving = Serving(generation, mode, kept, pinned, self._monitor_of(plan))
            await self._make_durable(serving, entry)
            flip = await asyncio.wrap_future(self._loop.flip(mode, generation.number, plan.change.in_flight))
            self._residency.serve(generation)
        self.serving = serving
        self._committed_mode_ticket = max(self._committed_mode_ticket, plan.mode_ticket)
        self._on_commit()
        plan.spend({"commit": _ms_since(began)})
        self._journal.note(replace(entry, flip_us=flip.microseconds, phases_ms=plan.phases_ms))
        if plan.is_swap:
            await self._run_in(self._reader, self._forget_unneeded)
        return self._report(plan, entry, flip)

    def _must_not_worsen(self, plan: Plan) -> bool:
        """Whether another parameter set has to be about as good as the one that serves, in the same precisions.

        The model's own set has served before; and precisions of layers are chosen knowing what noise they make.
        """
        wanted, target = plan.change.parameters, plan.target
        if wanted is None or wanted.path is None or target is None:
            return False
        return target.layers == self.serving.generation.layers

    def _mode_of(self, plan: Plan) -> PrecisionMode:
        """The mode to flip to: the one asked for, unless another one was asked for later."""
        wanted, serving = plan.change.mode, self.serving.mode
        if wanted is None or plan.mode_ticket >= self._committed_mode_ticket:
            return wanted or serving
        if plan.is_swap:
            return serving
        raise FailedPreconditionError(wanted.value, f"overtaken by a later switch to {serving.value}")

    def _monitor_of(self, plan: Plan) -> str:
        wanted = plan.change.monitor
        if wanted is None:
            return self.serving.monitor
        return json.dumps(wanted, sort_keys=True) if wanted else ""

    def _kept_with(self, generation: ServedGeneration) -> tuple[KeptGeneration, ...]:
        others = [kept for kept in self.serving.kept if kept.number != generation.number]
        return (kept_now(generation, self._residency), *others)[: self._config.keep_generations]

    def _forget_unneeded(self) -> None:
        """Removes sets that nothing needs by now. In the thread that keeps sets, so that none comes meanwhile."""
        newest = self._newest_swap
        self._catalogue.forget_all_but(self.serving.kept, frozenset({newest.set_hash} if newest else ()))

    async def _make_durable(self, serving: Serving, entry: HistoryEntry) -> None:
        state = Committed(
            serving.mode,
            self._config.default_mode,
            serving.generation.number,
            self._last_number,
            serving.kept,
            entry,
            serving.pinned,
            serving.monitor,
        )
        try:
            self._require_state_dir()
            await self._run_in(self._writer, partial(state.write, self._state_file))
        except OSError as error:
            raise FailedPreconditionError("state_dir", f"the change cannot be made durable: {error}") from error

    # Told

    def _entry(
        self, plan: Plan, mode: PrecisionMode | None = None, target: ServedGeneration | None = None
    ) -> HistoryEntry:
        """What history tells of `plan`; without a mode and a target, of one that was refused."""
        target = target or plan.target
        entry = replace(plan.entry, phases_ms=plan.phases_ms)
        if mode is not None:
            entry = replace(
                entry,
                from_mode=self.serving.mode,
                to_mode=mode,
                from_generation=self.serving.generation.number,
                proofs=self._proofs(plan),
            )
        if target is None:
            return entry
        return replace(entry, generation=target.number, hash=target.hash, parameter_set=target.parameters.hash)

    def _proofs(self, plan: Plan) -> tuple[ModeProof, ...]:
        if plan.target is None:
            return ()
        before = self._kl_now()
        after = self._residency.proofs(plan.target)
        return tuple(
            ModeProof(
                mode,
                before.get(mode),
                after[mode].divergence.mean_kl,
                after[mode].divergence.agreement,
                self._measure,
            )
            for mode in LADDER
            if mode in QUANTIZED and mode in after
        )

    def _kl_now(self) -> dict[PrecisionMode, float]:
        """What is known of the noise of the serving generation."""
        number = self.serving.generation.number
        return next((kept.kl for kept in self.serving.kept if kept.number == number), {})

    def _report(self, plan: Plan, entry: HistoryEntry | None = None, flip: FlipReport | None = None) -> ChangeReport:
        """Of a change that was made, or (without `entry` and `flip`) of one that will or would be."""
        now, target = self.serving, plan.target or self.serving.generation
        return ChangeReport(
            from_generation=entry.from_generation if entry else now.generation.number,
            to_generation=target.number,
            from_mode=flip.from_mode if flip else now.mode,
            to_mode=flip.to_mode if flip else plan.change.mode or now.mode,
            hash=target.hash,
            parameter_set=target.parameters.hash,
            changed=entry is not None or not self._is_served(plan),
            done=entry is not None,
            proofs=entry.proofs if entry else (),
            phases_ms=plan.phases_ms,
            flip_us=flip.microseconds if flip else 0.0,
            total_ms=_ms_since(plan.began),
        )


def kept_now(generation: ServedGeneration, residency: Residency) -> KeptGeneration:
    """`generation` as a rollback finds it again, with what its graphs in memory answered to the golden prompts."""
    kl = {mode: proof.divergence.mean_kl for mode, proof in residency.proofs(generation).items()}
    return KeptGeneration(
        generation.number, generation.hash, generation.parameters.hash, generation.layers, time.time(), kl
    )


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
