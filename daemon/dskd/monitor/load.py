"""The load rule over time: whether a model is held in a lower mode because many requests wait."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dskd.monitor.choices import Watches, is_tripped
from dskd.monitor.config import LoadConfig
from dskd.monitor.rules import LoadState, advance_load, is_above
from dskd.monitor.types import Served
from dskd.monitor.window import BATCHES
from dskquant.modes import PrecisionMode

ENOUGH_SAMPLES = 2 * BATCHES
"""Fewer tell nothing; what the parameter set is expected to have does."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """The mode of a model has changed."""

    reason: str
    before: PrecisionMode
    after: PrecisionMode


class LoadKeeper:
    """Holds the state of the rule."""

    def __init__(self) -> None:
        self.state = LoadState()

    def advance(self, served: Served, watches: Watches, rule: LoadConfig | None, now: float) -> LoadDecision | None:
        """The state at `now`. Where the rule has nothing to say it forgets everything."""
        before = self.state
        if rule is None or served.pinned or not is_above(served.mode, rule.mode):
            self.state = LoadState()
            return None
        waiting = served.loop.waiting
        mean_kl = known_kl(rule.mode, watches, served, now)
        self.state = advance_load(before, waiting, mean_kl, now, rule)
        if self.state.lowered is before.lowered:
            return None
        kl = "not known" if mean_kl is None else f"{mean_kl:.4g}"
        reason = (
            f"{waiting} requests wait, limit {rule.queue}; mean KL of {rule.mode.value} {kl}, limit {rule.max_kl:g}"
        )
        if self.state.lowered:
            return LoadDecision(reason, served.mode, rule.mode)
        return LoadDecision(reason, rule.mode, served.mode)


def known_kl(mode: PrecisionMode, watches: Watches, served: Served, now: float) -> float | None:
    """Mean KL of `mode` in nats per token: measured, else expected; infinity once it has tripped.

    None: not known, or the mode is not in memory.
    """
    if mode not in served.resident:
        return None
    if is_tripped(mode, watches):
        return math.inf
    statistics = watches[mode].statistics(now)
    if statistics.non_finite:
        return math.inf
    return statistics.mean if statistics.samples >= ENOUGH_SAMPLES else served.expected_kl.get(mode)
