"""What is counted of one mode of a model, for people and metrics."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from dskd.engine.request import HealthSample
from dskd.monitor.states import Cause
from dskd.monitor.types import NoisePoint

KEPT_POINTS = 4096
MEMORY_TOKENS = 256
"""Tokens that the means of health go back over."""


class RecentMean:
    """The mean of the first `MEMORY_TOKENS` values; after those, older values fade exponentially."""

    def __init__(self) -> None:
        self._count = 0
        self.value = math.nan

    def push(self, value: float) -> None:
        """Takes a value; one that is not finite tells nothing."""
        if not math.isfinite(value):
            return
        self._count = min(self._count + 1, MEMORY_TOKENS)
        self.value = value if self._count == 1 else self.value + (value - self.value) / self._count


class HealthMeans:
    """Of the tokens that a mode made."""

    def __init__(self) -> None:
        self.entropy = RecentMean()
        self.margin = RecentMean()
        self.unique_ngrams = RecentMean()

    def push(self, sample: HealthSample) -> None:
        self.entropy.push(sample.entropy)
        self.margin.push(sample.margin)
        self.unique_ngrams.push(sample.unique_ngrams)


@dataclass(slots=True)
class ModeReadings:
    """Of one mode since the model was loaded; `health` of its generation alone."""

    latest: deque[NoisePoint] = field(default_factory=lambda: deque(maxlen=KEPT_POINTS))
    total_samples: int = 0
    non_finite: int = 0
    trips: int = 0  # of the model, and of requests on their own
    cause: Cause | None = None  # of the last trip
    health: HealthMeans = field(default_factory=HealthMeans)
