"""What is known of the modes of a model and of its requests: observations in, changes of state out. No effects."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dskd.engine.request import BlockScore, NonFinite, Observation, ScoringPlan
from dskd.monitor import account
from dskd.monitor.choices import Watches, is_scored, replacement_of, serving_modes
from dskd.monitor.config import MonitorConfig
from dskd.monitor.noise import NoiseWatch
from dskd.monitor.policy import Transition, evidence_needed, threshold_of
from dskd.monitor.readings import HealthMeans, ModeReadings
from dskd.monitor.request_book import RequestBook, RequestRecord
from dskd.monitor.states import FallbackState, NoiseMeasure, Scope
from dskd.monitor.types import ModeNoise, NoisePoint, Served
from dskd.monitor.window import NoiseSample
from dskquant.modes import LADDER, REFERENCE, PrecisionMode

WATCHED = tuple(mode for mode in LADDER if mode is not REFERENCE)


@dataclass(frozen=True, slots=True)
class Decision:
    """A mode has changed its state."""

    reason: str  # with the numbers
    before: PrecisionMode  # what served
    after: PrecisionMode  # what shall serve
    outcome: str


class ModeBoard:
    """The watches of all modes, and with `scope = "request"` those of the open requests."""

    def __init__(self, config: MonitorConfig, measure: NoiseMeasure = NoiseMeasure.KL) -> None:
        self.config = config
        self.measure = measure
        self.watches: dict[PrecisionMode, NoiseWatch] = {}
        self.requests = RequestBook()
        self._readings = {mode: ModeReadings() for mode in WATCHED}
        self._generation: int | None = None

    def configure(self, config: MonitorConfig) -> None:
        """Goes on with another configuration: evidence starts afresh, and states too if the scope is another."""
        if config.scope is not self.config.scope:
            self.watches = {}
        self.requests = RequestBook()
        self.config = config

    def follow(self, served: Served, now: float) -> list[Decision]:
        """Makes the watches fit for the generation that serves, its thresholds and the configuration."""
        is_new = served.generation != self._generation
        self._generation = served.generation
        for mode in WATCHED:
            self._fit(mode, threshold_of(mode, self.config, served.expected_kl), is_new)
        return list(self._renew(served, now)) if is_new else []

    def _fit(self, mode: PrecisionMode, threshold: float | None, is_new: bool) -> None:
        watch = self.watches.get(mode)
        if watch is not None and watch.config == self.config and (is_new or watch.threshold == threshold):
            return
        self.watches[mode] = NoiseWatch(self.config, threshold)
        if watch is not None:
            self.watches[mode].fallback = watch.fallback

    def _renew(self, served: Served, now: float) -> Iterator[Decision]:
        self.requests.forget_calm()
        for mode, watch in self.watches.items():
            self._readings[mode].health = HealthMeans()
            before = self._serves_for(mode, self.watches, served)
            statistics = watch.statistics(now)
            transition = watch.renew(now, threshold_of(mode, self.config, served.expected_kl), pinned=served.pinned)
            if transition is not None:
                generation = f"generation {served.generation}"
                reason = account.reason_of(mode, transition, statistics, watch.threshold, generation, self.measure)
                yield self._decision(mode, transition, reason, before, self.watches, served)

    def take(self, observations: Iterable[Observation], now: float) -> None:
        """Counts what was observed of the generation that serves; of others, only that the requests are open."""
        for observation in observations:
            record = self._hear(observation.request_id, now)
            if observation.generation != self._generation or observation.mode not in self.watches:
                continue
            if isinstance(observation, BlockScore):
                own = None if observation.is_probe else record  # the request was not served by what a probe scores
                self._take_score(observation, self._watches_for(observation.mode, own), now)
            elif isinstance(observation, NonFinite):
                self._take_non_finite(observation, self._watches_for(observation.mode, record))
            else:
                self._readings[observation.mode].health.push(observation)

    def _hear(self, request_id: str, now: float) -> RequestRecord | None:
        return self.requests.hear(request_id, now) if self.config.scope is Scope.REQUEST else None

    def _watches_for(self, mode: PrecisionMode, record: RequestRecord | None) -> list[NoiseWatch]:
        """That of the model, and that of the request if it has its own."""
        watch = self.watches[mode]
        if record is None:
            return [watch]
        self.requests.mark(record)
        if mode not in record.watches:
            record.watches[mode] = NoiseWatch(self.config, watch.threshold)
        return [watch, record.watches[mode]]

    def _take_score(self, score: BlockScore, watches: list[NoiseWatch], now: float) -> None:
        readings, epoch = self._readings[score.mode], time.time() - now
        for kl, agrees, made in zip(score.kl.tolist(), score.agrees.tolist(), score.made.tolist(), strict=True):
            for watch in watches:
                watch.observe(NoiseSample(kl, agrees, made))
            readings.latest.append(NoisePoint(epoch + made, kl, agrees, score.generation))
            readings.total_samples += 1
            if score.is_probe and math.isinf(kl):  # where the mode served, the loop has told of it
                readings.non_finite += 1

    def _take_non_finite(self, found: NonFinite, watches: list[NoiseWatch]) -> None:
        self._readings[found.mode].non_finite += 1
        for watch in watches:
            watch.note_non_finite()

    def advance(self, served: Served, plan: ScoringPlan | None, now: float) -> list[Decision]:
        """Changes the states for which it is time, while the loop scores by `plan`."""
        if self.config.scope is Scope.MODEL:
            return list(self._advance_model(served, plan, now))
        self.requests.forget_silent(now)
        news = self.requests.take_news()
        return [decision for record in news for decision in self._advance_request(record, served, now)]

    def _advance_model(self, served: Served, plan: ScoringPlan | None, now: float) -> Iterator[Decision]:
        for mode, watch in self.watches.items():
            scored = is_scored(mode, plan, served, self.config, tripped=watch.fallback.is_tripped)
            yield from self._advance(mode, self.watches, served, now, scored)

    def _advance_request(self, record: RequestRecord, served: Served, now: float) -> Iterator[Decision]:
        for mode in record.watches:
            for decision in self._advance(mode, record.watches, served, now, scored=True):
                yield replace(decision, reason=f"request {record.request_id}: {decision.reason}")

    def _advance(
        self, mode: PrecisionMode, watches: Watches, served: Served, now: float, scored: bool
    ) -> Iterator[Decision]:
        watch, state = watches[mode], watches[mode].fallback.state
        before, signals = self._serves_for(mode, watches, served), watch.signals(is_scored=scored)
        transition = watch.advance(now, is_scored=scored, pinned=served.pinned)
        if transition is None:
            return
        if transition.after is FallbackState.TRIPPED:
            self._readings[mode].trips += 1
            self._readings[mode].cause = watch.fallback.cause
        evidence = account.evidence_in_words(signals, state, self.config)
        statistics = watch.statistics(now)
        reason = account.reason_of(mode, transition, statistics, watch.threshold, evidence, self.measure)
        yield self._decision(mode, transition, reason, before, watches, served)

    def _decision(
        self,
        mode: PrecisionMode,
        transition: Transition,
        reason: str,
        before: PrecisionMode,
        watches: Watches,
        served: Served,
    ) -> Decision:
        if served.pinned:
            return Decision(f"{reason}; an operator has pinned {served.mode.value}", mode, mode, account.SUPPRESSED)
        if not self._bends(mode, watches, served):
            return Decision(f"{reason}; the model serves in {served.mode.value}", mode, mode, account.SUPPRESSED)
        return Decision(reason, before, self._serves_for(mode, watches, served), account.COMMITTED)

    def _serves_for(self, mode: PrecisionMode, watches: Watches, served: Served) -> PrecisionMode:
        """What serves where `mode` would if it were healthy."""
        if not watches[mode].fallback.is_tripped or not self._bends(mode, watches, served):
            return mode
        return replacement_of(mode, watches, self.config.target, served.resident).serving

    def _bends(self, mode: PrecisionMode, watches: Watches, served: Served) -> bool:
        """Whether the state of `mode` has a say in what serves. A mode that was scored for a request served it."""
        is_used = watches is not self.watches or mode in serving_modes(served, self.config)
        return is_used and not served.pinned

    def mode_noise(self, mode: PrecisionMode, samples: int, now: float) -> ModeNoise:
        """What people see of one of `watches`, with up to `samples` of its latest points."""
        watch, readings = self.watches[mode], self._readings[mode]
        signals, points = watch.signals(is_scored=True), list(readings.latest)
        return ModeNoise(
            mode=mode,
            state=watch.fallback.state,
            cause=readings.cause.value if readings.cause else "",
            trips=readings.trips,
            threshold=watch.threshold,
            statistics=watch.statistics(now),
            total_samples=readings.total_samples,
            non_finite=readings.non_finite,
            evidence=max(signals.noise, signals.disagreement),
            evidence_needed=evidence_needed(watch.fallback.state, self.config),
            entropy=readings.health.entropy.value,
            margin=readings.health.margin.value,
            unique_ngrams=readings.health.unique_ngrams.value,
            latest=tuple(points[max(0, len(points) - samples) :]),
        )
