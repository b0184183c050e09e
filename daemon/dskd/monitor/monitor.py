"""The noise monitor of one model: observations of the step loop in, effects out.

It works by comparing: each round reads what the model serves with, takes the observations in, lets the states of the
modes follow (`dskd.monitor.board`), computes what must hold then (`dskd.monitor.choices`), and does what does not hold
yet. What fails is therefore done again in the next round, and nothing is decided on an old view.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from dskd.engine.request import BlockScore, HealthSample, ModeRules, NonFinite, Observation, ScoringPlan
from dskd.errors import EXPECTED_ERRORS
from dskd.manager.types import HistoryEntry
from dskd.monitor import account
from dskd.monitor.board import ModeBoard
from dskd.monitor.choices import Replacement, replacement, scoring_plan, serving_modes
from dskd.monitor.config import MonitorConfig
from dskd.monitor.load import LoadKeeper
from dskd.monitor.metrics import EventMetrics
from dskd.monitor.ready_modes import ReadyModes
from dskd.monitor.request_book import RequestRecord
from dskd.monitor.rules import is_above
from dskd.monitor.states import NoiseMeasure, Repair, Scope
from dskd.monitor.types import MonitoredModel, NoiseSnapshot, Served
from dskquant.modes import PrecisionMode

TICK_S = 1.0
"""Longest time between two rounds: dwell times and the load rule need no observation to end."""


class NoiseMonitor:
    """Belongs to the asyncio thread. All decisions are made by `run`, one round after the other."""

    def __init__(
        self,
        model: str,
        config: MonitorConfig,
        target: MonitoredModel,
        clock: Callable[[], float] = time.monotonic,
        metrics: EventMetrics | None = None,
        measure: NoiseMeasure = NoiseMeasure.KL,
    ) -> None:
        """`clock` is the one that the step loop dates tokens by."""
        self._model = model
        self._target = target
        self._clock = clock
        self._metrics = metrics
        self._board = ModeBoard(config, measure)
        self._load = LoadKeeper()
        self._inbox: list[Observation] = []
        self._untold: list[HistoryEntry] = []
        self._rules: ModeRules | None = None  # what the loop was told last
        self._plan: ScoringPlan | None = None
        self._wake = asyncio.Event()
        self._ready = ReadyModes(target, self._wake.set)
        self._log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger().bind(model=model)

    def observe(self, observations: list[Observation]) -> None:
        """Takes what the step loop tells. What could change a decision brings the next round forward."""
        self._inbox += observations
        if any(not isinstance(observation, HealthSample) for observation in observations):
            self._wake.set()

    def renew(self) -> None:
        """What the model serves with has changed: its generation, mode, pin or what is in memory."""
        self._wake.set()

    def configure(self, config: MonitorConfig) -> None:
        """Goes on with another configuration: evidence starts afresh, and states too if the scope is another."""
        self._board.configure(config)
        self._wake.set()

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._board.requests.forget(request_id)
        if self._config.scope is Scope.REQUEST:
            self._wake.set()  # its target may be let go

    async def run(self) -> None:
        """Rounds until cancelled, one a second at least. One that fails is logged, and made good by the next."""
        while True:
            timer = asyncio.get_running_loop().call_later(TICK_S, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
            try:
                await self.decide()
            except Exception as error:
                unexpected = None if isinstance(error, EXPECTED_ERRORS) else error
                self._log.error("noise monitor: round failed", reason=str(error), exc_info=unexpected)
                await asyncio.sleep(TICK_S)

    async def decide(self) -> None:
        """One round. Raises what the model raises; the next round makes good for it."""
        now, served = self._clock(), self._target.served()
        self._advance(served, now)
        await self._set_rules(served)
        await self._set_scoring(served)
        await self._escalate(served)
        self._keep_ready(served, now)
        self._tell()

    def close(self) -> None:
        """Lets go of all modes. `run` must have ended."""
        self._ready.close()

    def snapshot(self, samples: int) -> NoiseSnapshot:
        """What is known as of the last round, with up to `samples` of the latest points of each mode."""
        now, served = self._clock(), self._target.served()
        noises = [self._board.mode_noise(mode, samples, now) for mode in self._board.watches]
        return NoiseSnapshot(
            generation=served.generation,
            reference=self._plan.reference if self._plan else None,
            modes=tuple(noise for noise in noises if noise.threshold is not None or noise.total_samples),
            fallback=_serving_fallback(self._rules),
            lowered=self._load.state.lowered,
            pin=served.mode if served.pinned else None,
            escalated_requests=sum(record.escalated is not None for record in self._board.requests.tripped()),
            measure=self._board.measure,
        )

    @property
    def _config(self) -> MonitorConfig:
        return self._board.config

    def _advance(self, served: Served, now: float) -> None:
        """All that is decided without waiting."""
        inbox, self._inbox = self._inbox, []
        decisions = self._board.follow(served, now)
        self._board.take(inbox, now)
        self._count(inbox)
        decisions += self._board.advance(served, self._plan, now)
        for decision in decisions:
            self._record(account.FALLBACK, decision.outcome, decision.reason, served, decision.before, decision.after)
        lowered = self._load.advance(served, self._board.watches, self._config.load, now)
        if lowered is not None:
            self._record(account.SWITCH, account.COMMITTED, lowered.reason, served, lowered.before, lowered.after)

    def _count(self, observations: list[Observation]) -> None:
        if self._metrics is None:
            return
        for observation in observations:
            if isinstance(observation, BlockScore):
                self._metrics.count_score(self._model, observation)
            elif isinstance(observation, NonFinite):
                self._metrics.count_non_finite(self._model, observation)

    def _record(
        self, kind: str, outcome: str, reason: str, served: Served, before: PrecisionMode, after: PrecisionMode
    ) -> None:
        self._untold.append(account.entry_of(self._model, kind, outcome, reason, served.generation, before, after))

    async def _set_rules(self, served: Served) -> None:
        """Tells the loop which modes may serve; with `repair` when it is a fallback that raises them."""
        former = _serving_fallback(self._rules)
        rules = self._wanted_rules(served)
        if rules == self._rules:
            return
        fallback = _serving_fallback(rules)
        is_new = fallback is not None and fallback is not former
        await self._target.set_rules(rules, is_new and self._config.repair is Repair.REPREFILL)
        self._rules = rules
        if is_new and fallback is not None and not self._untold:  # no change of state tells of it
            reason = f"{fallback.value} is the best there is in memory instead of a tripped mode"
            before = former or served.mode
            self._record(account.FALLBACK, account.COMMITTED, reason, served, before, fallback)

    def _wanted_rules(self, served: Served) -> ModeRules:
        instead = self._instead(served)
        fallback = instead.serving if instead is not None and instead.serving is not instead.mode else None
        pin = served.mode if served.pinned else None
        return ModeRules(self._config, fallback, self._load.state.lowered, pin)

    def _instead(self, served: Served) -> Replacement | None:
        """What all requests need in place of the modes that the model serves in."""
        if self._config.scope is not Scope.MODEL:
            return None
        modes = serving_modes(served, self._config)
        return replacement(modes, self._board.watches, self._config.target, served.resident)

    async def _set_scoring(self, served: Served) -> None:
        plan = scoring_plan(served, self._config, self._board.watches, self._load.state)
        if plan != self._plan:
            await self._target.set_scoring(plan)
            self._plan = plan

    async def _escalate(self, served: Served) -> None:
        """Raises the requests that suffer, one by one; again when something better has come into memory."""
        if served.pinned:
            return
        for record in self._board.requests.tripped():
            instead = self._instead_of(record, served)
            if instead is None or not is_above(instead.serving, record.escalated or instead.mode):
                continue
            mode = instead.serving
            is_open = await self._target.escalate(record.request_id, mode, self._config.repair is Repair.REPREFILL)
            if is_open:
                record.escalated = mode
            else:
                self._board.requests.forget(record.request_id)

    def _instead_of(self, record: RequestRecord, served: Served) -> Replacement | None:
        return replacement(record.watches, record.watches, self._config.target, served.resident)

    def _keep_ready(self, served: Served, now: float) -> None:
        for failure in self._ready.want(self._targets(served), served, now, self._config.dwell_s):
            unexpected = None if isinstance(failure.error, EXPECTED_ERRORS) else failure.error
            reason = f"{failure.mode.value} cannot be made ready: {failure.error!s}"
            self._log.error("fallback not ready", reason=reason, exc_info=unexpected)
            stays = _serving_fallback(self._rules) or served.mode
            reason += f"; tried again in {self._config.dwell_s:g} s"
            self._record(account.FALLBACK, account.REJECTED, reason, served, stays, failure.mode)

    def _targets(self, served: Served) -> frozenset[PrecisionMode]:
        """The modes that must come into memory, or stay there."""
        if served.pinned:
            return frozenset()
        instead = [self._instead(served), *(self._instead_of(one, served) for one in self._board.requests.tripped())]
        return frozenset(one.target for one in instead if one is not None)

    def _tell(self) -> None:
        """Notes what has been decided, now that it holds."""
        untold, self._untold = self._untold, []
        for entry in untold:
            self._target.note(entry)


def _serving_fallback(rules: ModeRules | None) -> PrecisionMode | None:
    """The fallback that really serves."""
    return None if rules is None or rules.pin is not None else rules.fallback
