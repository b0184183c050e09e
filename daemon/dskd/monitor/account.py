"""What the history is told of the decisions of a monitor: the numbers that decided, in one sentence."""

from __future__ import annotations

import math

from dskd.manager.types import HistoryEntry
from dskd.monitor.config import MonitorConfig
from dskd.monitor.policy import Signals, Transition, evidence_needed
from dskd.monitor.states import FallbackState, NoiseMeasure
from dskd.monitor.window import NoiseStatistics
from dskquant.modes import PrecisionMode

ACTOR = "monitor"
FALLBACK, SWITCH = "fallback", "switch"
COMMITTED, SUPPRESSED, REJECTED = "committed", "suppressed", "rejected"


def entry_of(
    model: str,
    kind: str,
    outcome: str,
    reason: str,
    generation: int,
    before: PrecisionMode,
    after: PrecisionMode,
) -> HistoryEntry:
    """`before` and `after` are what served and what serves; a decision of the load rule is of the kind "switch"."""
    return HistoryEntry(model, kind, ACTOR, outcome, reason, before, after, generation, from_generation=generation)


MEASURES = {NoiseMeasure.KL: "KL", NoiseMeasure.NOISE_TO_SIGNAL: "noise-to-signal ratio"}


def reason_of(
    mode: PrecisionMode,
    transition: Transition,
    statistics: NoiseStatistics,
    threshold: float | None,
    evidence: str,
    measure: NoiseMeasure = NoiseMeasure.KL,
) -> str:
    """Which mode, what became of it, why, and the numbers; KL in nats per token."""
    limit = "no threshold" if threshold is None else f"threshold {threshold:.4g}"
    return (
        f"{mode.value} {transition.before.value} -> {transition.after.value}: {transition.reason}; "
        f"{describe(statistics, measure)}, {limit}, {evidence}"
    )


def describe(statistics: NoiseStatistics, measure: NoiseMeasure = NoiseMeasure.KL) -> str:
    """The window in words: the mean with its 95 % interval."""
    if not statistics.samples:
        return "no samples"
    text = f"mean {MEASURES[measure]} {statistics.mean:.4g}"
    if math.isfinite(statistics.low):
        text += f" ({statistics.low:.4g} to {statistics.high:.4g})"
    text += f" over {statistics.samples} samples, agreement {statistics.agreement:.3f}"
    return text + (f", {statistics.non_finite} not finite" if statistics.non_finite else "")


def evidence_in_words(signals: Signals, state: FallbackState, config: MonitorConfig) -> str:
    """What the signals said while the mode was in `state`."""
    text = f"evidence of noise {signals.noise:.1f} and of disagreement {signals.disagreement:.1f}"
    text += f" (needed: {evidence_needed(state, config):.1f})"
    if signals.recovery is not None:
        text += f", of recovery {signals.recovery:.1f}"
    return text + (f", not finite {signals.non_finite} times" if signals.non_finite else "")
