"""The noise of one mode (of a model or of one request): samples in, changes of state out."""

from __future__ import annotations

import math

from dskd.monitor.bets import FALL_BETS, RISE_BETS, MeanDetector
from dskd.monitor.config import MonitorConfig
from dskd.monitor.policy import Fallback, Signals, Transition, advance, renew
from dskd.monitor.window import NoiseSample, NoiseStatistics, NoiseWindow


class NoiseWatch:
    """Holds the window, the evidence and the fallback state of a mode, and keeps them in step.

    Samples of the mode are alike whether it serves or is scored in the shadow of its fallback.
    """

    def __init__(self, config: MonitorConfig, threshold: float | None) -> None:
        """`threshold` is the mean KL in nats that `dskd.monitor.policy.threshold_of` tells; None: KL trips nothing."""
        self.config = config
        self.threshold = threshold
        self.fallback = Fallback()
        self._window = NoiseWindow(config.window, config.window_s)
        self._restart(-math.inf)

    def observe(self, sample: NoiseSample) -> None:
        """Takes a scored token of the mode. One made before the last change of state or generation is no evidence."""
        self._window.push(sample)
        if sample.made < self._since:
            return
        self._disagreement.push(0.0 if sample.agrees else 1.0)
        if self._noise is not None and self._recovery is not None:
            self._noise.push(sample.kl)
            self._recovery.push(sample.kl)

    def note_non_finite(self) -> None:
        """The mode served, and its logits were not finite."""
        self._non_finite += 1

    def advance(self, now: float, *, is_scored: bool, pinned: bool = False) -> Transition | None:
        """Changes the state if it is time to; `is_scored` says whether samples of the mode can be expected now."""
        signals = self.signals(is_scored=is_scored)
        self.fallback, transition = advance(self.fallback, signals, now, self.config, pinned=pinned)
        if transition is not None:
            self._restart(now)
        return transition

    def renew(self, now: float, threshold: float | None, *, pinned: bool = False) -> Transition | None:
        """A new generation was committed, with a threshold of its own."""
        self.threshold = threshold
        self.fallback, transition = renew(self.fallback, now, self.config, pinned=pinned)
        self._window = NoiseWindow(self.config.window, self.config.window_s)
        self._restart(now)
        return transition

    def signals(self, *, is_scored: bool) -> Signals:
        """What decides."""
        noise = self._noise.evidence if self._noise is not None else 0.0
        recovery = self._recovery.evidence if self._recovery is not None and is_scored else None
        return Signals(noise, self._disagreement.evidence, recovery, self._non_finite)

    def statistics(self, now: float) -> NoiseStatistics:
        """What people see."""
        return self._window.statistics(now)

    def _restart(self, now: float) -> None:
        self._since = now
        self._non_finite = 0
        self._disagreement = MeanDetector(1.0 - self.config.min_agreement, RISE_BETS)
        self._noise = self._detector(1.0, RISE_BETS)
        self._recovery = self._detector(self.config.hysteresis, FALL_BETS)

    def _detector(self, scale: float, bets: tuple[float, ...]) -> MeanDetector | None:
        return None if self.threshold is None else MeanDetector(scale * self.threshold, bets)
