"""When a mode falls back and when it returns: a pure function of state, signals, time and configuration.

    HEALTHY --- noise, disagreement, non-finite ---> TRIPPED: the fallback serves, for at least the dwell
    TRIPPED --- dwell over and the noise gone -----> COOLING: the mode serves on trial, samples start afresh
    COOLING --- any sign of noise -----------------> TRIPPED again at once, with twice the dwell
    COOLING --- the noise shown to be gone --------> HEALTHY; a trip soon after it counts as a failed trial
    TRIPPED --- a new generation is committed -----> COOLING at once, with the first dwell again

While TRIPPED, the mode goes on being scored in the shadow of the fallback: that is how it learns that noise is gone.
Where it cannot be scored, the trial itself has to tell, once a dwell. A fallback comes at once whenever it is needed;
it is the returns that wait, so two returns are a dwell apart unless there is a new generation.
With `scope = "request"` a request stays with its fallback to its end.

An operator's pin does not stop the machine: state goes on, transitions are marked as suppressed, and
`dskd.monitor.rules.effective_mode` lets the pin win. When the pin is taken away the state is the right one at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from dskd.monitor.config import NEXT, SMALLEST_KL, MonitorConfig
from dskd.monitor.states import Cause, FallbackState, Scope
from dskquant.modes import LADDER, PrecisionMode

RETURN_EVIDENCE = math.log(100.0)
"""Of a mean below the threshold: with noise right on the limit a false return takes 100 samples on average at worst."""

HASTE = math.log(100.0)
"""By this much less evidence of noise is enough where a mode is suspect already, or where little is lost by mistake."""

LEAST_EVIDENCE = math.log(10.0)


@dataclass(frozen=True, slots=True)
class Signals:
    """What the samples since the last transition say; evidence as in `dskd.monitor.bets`."""

    noise: float = 0.0  # evidence that mean KL is above the threshold
    disagreement: float = 0.0  # evidence that agreement is below its limit
    recovery: float | None = 0.0  # evidence that mean KL is below hysteresis x threshold; None: the mode is not scored
    non_finite: int = 0


@dataclass(frozen=True, slots=True)
class Fallback:
    """Where the fallback of one mode (of a model or of a request) stands; times in seconds of a steady clock."""

    state: FallbackState = FallbackState.HEALTHY
    since: float = -math.inf
    cause: Cause | None = None  # of the last trip
    dwell_s: float = 0.0  # of the last trip
    returned: float = -math.inf  # when the mode last came back from a fallback
    trips: int = 0

    @property
    def is_tripped(self) -> bool:
        return self.state is FallbackState.TRIPPED


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state. After any, evidence starts afresh."""

    before: FallbackState
    after: FallbackState
    reason: str
    suppressed: bool  # an operator's pin keeps what serves

    @property
    def changes_mode(self) -> bool:
        """Whether another mode serves from now on."""
        tripped = FallbackState.TRIPPED
        return not self.suppressed and (self.before is tripped) != (self.after is tripped)


def advance(
    fallback: Fallback, signals: Signals, now: float, config: MonitorConfig, *, pinned: bool = False
) -> tuple[Fallback, Transition | None]:
    """The state at `now`, and how it was reached if it is another one."""
    following, reason = _next(fallback, signals, now, config)
    if following is fallback:
        return fallback, None
    return following, Transition(fallback.state, following.state, reason, pinned)


def renew(
    fallback: Fallback, now: float, config: MonitorConfig, *, pinned: bool = False
) -> tuple[Fallback, Transition | None]:
    """The state after a new generation was committed: what is known of the old one does not hold for it."""
    if not fallback.is_tripped or config.scope is Scope.REQUEST:
        return fallback, None
    renewed = Fallback(FallbackState.COOLING, now, fallback.cause, 0.0, now, fallback.trips)
    return renewed, Transition(fallback.state, renewed.state, "new generation", pinned)


def _next(fallback: Fallback, signals: Signals, now: float, config: MonitorConfig) -> tuple[Fallback, str]:
    if fallback.is_tripped:
        if _may_return(fallback, signals, now, config):
            reason = "noise is gone" if signals.recovery is not None else "tried again, as its noise is not measured"
            return replace(fallback, state=FallbackState.COOLING, since=now, returned=now), reason
        return fallback, ""
    cause = _cause(fallback, signals, config)
    if cause is not None:
        return _tripped(fallback, cause, now, config), cause.value
    if fallback.state is FallbackState.COOLING and _is_proven(fallback, signals, now, config):
        return replace(fallback, state=FallbackState.HEALTHY, since=now), "trial passed"
    return fallback, ""


def _cause(fallback: Fallback, signals: Signals, config: MonitorConfig) -> Cause | None:
    if signals.non_finite:
        return Cause.NON_FINITE
    needed = evidence_needed(fallback.state, config)
    if signals.noise >= needed:
        return Cause.NOISE
    return Cause.DISAGREEMENT if signals.disagreement >= needed else None


def evidence_needed(state: FallbackState, config: MonitorConfig) -> float:
    """Evidence at which a mode in `state` falls back: less on trial, and less for a request, whose samples are few."""
    needed = math.log(config.false_trip_samples)
    is_hasty = state is FallbackState.COOLING or config.scope is Scope.REQUEST
    return max(needed - HASTE, LEAST_EVIDENCE) if is_hasty else needed


def _tripped(fallback: Fallback, cause: Cause, now: float, config: MonitorConfig) -> Fallback:
    is_on_trial = fallback.state is FallbackState.COOLING
    is_relapse = is_on_trial or now - fallback.returned < config.max_dwell_s
    dwell_s = min(max(2 * fallback.dwell_s, config.dwell_s), config.max_dwell_s) if is_relapse else config.dwell_s
    return Fallback(FallbackState.TRIPPED, now, cause, dwell_s, fallback.returned, fallback.trips + 1)


def _may_return(fallback: Fallback, signals: Signals, now: float, config: MonitorConfig) -> bool:
    is_dwell_over = now - fallback.since >= fallback.dwell_s
    return is_dwell_over and config.scope is not Scope.REQUEST and _seems_gone(signals, config)


def _is_proven(fallback: Fallback, signals: Signals, now: float, config: MonitorConfig) -> bool:
    is_known = signals.recovery is not None or now - fallback.since >= config.dwell_s
    return is_known and _seems_gone(signals, config)


def _seems_gone(signals: Signals, config: MonitorConfig) -> bool:
    """Whether mean KL is low, as far as it is measured, and agreement is not the one thing that is still bad."""
    is_low = signals.recovery is None or signals.recovery >= RETURN_EVIDENCE
    return is_low and signals.disagreement < evidence_needed(FallbackState.COOLING, config)


def threshold_of(
    mode: PrecisionMode, config: MonitorConfig, expected_kl: Mapping[PrecisionMode, float]
) -> float | None:
    """Mean KL of `mode`, nats per token, above which it falls back; None: neither configured nor known of its set.

    FP32 has none, it is the reference.
    """
    given: float | None = getattr(config.threshold, mode.value, None)
    if given is not None or mode not in expected_kl:
        return given
    return max(config.factor * expected_kl[mode], SMALLEST_KL)


def target_of(mode: PrecisionMode, target: str, resident: Collection[PrecisionMode]) -> PrecisionMode | None:
    """The mode that shall serve while `mode` is tripped; None: nothing is more exact.

    `target` is that of the configuration; one that is not more exact than `mode` means the next mode.
    """
    above = _above(mode)
    if not above:
        return None
    if target != NEXT and PrecisionMode(target) in above:
        return PrecisionMode(target)
    return next((better for better in above if better in resident), above[0])


def stand_in(mode: PrecisionMode, wanted: PrecisionMode, resident: Collection[PrecisionMode]) -> PrecisionMode:
    """What serves in place of `mode` now: `wanted` if it is in memory, until then the most exact mode that is.

    `mode` itself while nothing more exact is resident.
    """
    if wanted in resident:
        return wanted
    return next((better for better in reversed(_above(mode)) if better in resident), mode)


def _above(mode: PrecisionMode) -> tuple[PrecisionMode, ...]:
    return LADDER[LADDER.index(mode) + 1 :]
