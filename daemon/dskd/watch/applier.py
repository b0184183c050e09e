"""Makes the models serve with what the files of the watched directory say, and keeps track of that over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable
from pathlib import Path

import structlog

from dskd.errors import EXPECTED_ERRORS, UnknownModelError
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.types import HistoryEntry
from dskd.watch.drop_ins import DropIns, names_of
from dskd.watch.plan import Attempt, ModelPlan, ModelView, UnknownModel
from dskd.watch.scan import set_fingerprint
from dskd.watch.settling import Settling
from dskd.watch.state_file import WatchState
from dskd.watch.target import Target

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


class Applier:
    """Owns the plans of the models and the tasks that carry them out. Belongs to the asyncio thread."""

    def __init__(
        self, state_file: Path, settle_s: float, target: Target, history: History, events: EventBus, wake: asyncio.Event
    ) -> None:
        self.drop_ins = DropIns()
        self._state_file = state_file
        self._target = target
        self._history = history
        self._events = events
        self._wake = wake  # set when an attempt has ended
        self._plans: dict[str, ModelPlan] = {}
        self._sets = Settling(settle_s)
        self._set_states: dict[str, Hashable] = {}
        self._attempts: set[asyncio.Task[None]] = set()
        self._saved = WatchState()
        self._saving = asyncio.Lock()

    @property
    def awaits_moving_set(self) -> bool:
        """A parameter set is being written that a config names."""
        return bool(self._sets.moving)

    @property
    def awaits_other_set(self) -> bool:
        """A config was refused that may be accepted when the parameter set it names has changed."""
        return any(plan.is_refused and plan.wanted_set for plan in self._plans.values())

    def restore(self, state: WatchState) -> None:
        """Goes on from what an earlier process kept; `drop_ins` must hold its files by now."""
        self._saved = state
        self._plans = {model: ModelPlan(config) for model, config in state.applied.items()}
        self._aim()

    def retry(self) -> None:
        """What was refused may be tried, and told, again."""
        for plan in self._plans.values():
            plan.retry()

    async def reconcile(self, now: float) -> None:
        """Begins whatever has to be done at `now` so that the models serve with what the drop-ins say."""
        self._aim()
        await self._look_at_sets(now)
        await self._save()
        for model, plan in self._plans.items():
            step = plan.next_step(self._view(model, plan.wanted_set))
            if isinstance(step, UnknownModel):
                error = UnknownModelError(model, self._target.names())
                self.reject(model, plan.files, f"{names_of(plan.files)}: {error}")
            elif step is not None:
                self._begin(model, plan, step)

    def reject(self, model: str, files: Iterable[str], reason: str) -> None:
        """Records a refusal that no manager has recorded."""
        actor = _actor(files)
        entry = self._history.append(HistoryEntry(model, "apply", actor, "rejected", reason))
        log.error("quant config refused", model=model, actor=actor, reason=entry.reason)
        self._events.publish("apply.rejected", model, entry.reason, actor=actor, reason=entry.reason)

    async def close(self) -> None:
        """Cancels what is under way, waits until that has ended, and keeps what had been reached."""
        for task in self._attempts:
            task.cancel()
        await asyncio.gather(*self._attempts, return_exceptions=True)
        await self._save()

    def _aim(self) -> None:
        desired = self.drop_ins.desired()
        for model in sorted(desired.keys() - self._plans.keys()):
            self._plans[model] = ModelPlan()
        for model, plan in self._plans.items():
            plan.aim(desired.get(model), self.drop_ins.files_of(model))
        self._plans = {model: plan for model, plan in self._plans.items() if not plan.is_over}

    async def _look_at_sets(self, now: float) -> None:
        paths = {plan.wanted_set for plan in self._plans.values() if plan.wanted_set}
        self._set_states = await asyncio.to_thread(lambda: {path: set_fingerprint(Path(path)) for path in paths})
        self._sets.observe(now, self._set_states)

    def _view(self, model: str, wanted_set: str) -> ModelView:
        if model not in self._target.names():
            return ModelView(default_mode=None)
        return ModelView(
            self._target.default_mode(model),
            self._target.is_serving(model),
            self._set_states.get(wanted_set),
            wanted_set not in self._sets.moving,
        )

    def _begin(self, model: str, plan: ModelPlan, attempt: Attempt) -> None:
        task = asyncio.create_task(self._carry_out(model, plan, attempt), name=f"apply {model}")
        self._attempts.add(task)
        task.add_done_callback(self._attempts.discard)

    async def _carry_out(self, model: str, plan: ModelPlan, attempt: Attempt) -> None:
        actor = _actor(plan.files)
        try:
            await self._target.apply(model, attempt.change, actor)
        except Exception as error:
            unexpected = None if isinstance(error, EXPECTED_ERRORS) else error
            log.warning("quant config not applied", model=model, actor=actor, reason=str(error), exc_info=unexpected)
            if model in self._target.names() and self._target.is_serving(model):
                plan.refused(attempt)
            else:
                plan.interrupted(attempt)
        else:
            plan.succeeded(attempt)
            log.info("quant config applied", model=model, actor=actor)
            await self._save()
        self._wake.set()

    async def _save(self) -> None:
        """Keeps the state if it has changed. A write goes on when the caller is cancelled: no two ever run at once."""
        await asyncio.shield(asyncio.create_task(self._save_alone()))

    async def _save_alone(self) -> None:
        async with self._saving:
            applied = {model: plan.applied for model, plan in self._plans.items() if plan.applied}
            state = WatchState(dict(self.drop_ins.texts), applied)
            if state == self._saved:
                return
            try:
                await asyncio.to_thread(state.write, self._state_file)
            except OSError as error:
                log.error("state of the watcher not kept", path=str(self._state_file), reason=str(error))
            else:
                self._saved = state


def _actor(files: Iterable[str]) -> str:
    return f"watch:{names_of(files)}"
