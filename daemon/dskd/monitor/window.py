"""Statistics of the latest noise samples, for people. Decisions rest on `dskd.monitor.bets`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from dskquant.divergence import Float64

BATCHES = 20
STUDENT_T = 2.093
"""97.5 % quantile of Student's t with BATCHES - 1 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """A token that was also scored by the reference."""

    kl: float  # KL(reference || mode), nats; infinity where the mode was not finite
    agrees: bool  # the reference has the same most probable token
    made: float  # when the token was made, seconds of a steady clock


@dataclass(frozen=True, slots=True)
class NoiseStatistics:
    """Of the samples in a window; figures of KL in nats, of the finite samples, NaN when there are none."""

    samples: int
    non_finite: int
    mean: float
    low: float  # two-sided 95 % interval of the mean; NaN below 2 x BATCHES samples
    high: float
    p50: float
    p90: float
    p99: float
    agreement: float  # share of samples


class NoiseWindow:
    """The last samples of one mode, of a model or of a request."""

    def __init__(self, size: int, seconds: float = math.inf) -> None:
        """Holds up to `size` samples, none older than `seconds`."""
        self._samples: deque[NoiseSample] = deque(maxlen=size)
        self._seconds = seconds
        self.total = 0  # samples ever

    def push(self, sample: NoiseSample) -> None:
        """Takes a sample; samples come in the order in which their tokens were made, or nearly so."""
        self._samples.append(sample)
        self.total += 1

    def statistics(self, now: float) -> NoiseStatistics:
        """Of the samples that are not too old at `now`."""
        recent = [sample for sample in self._samples if now - sample.made <= self._seconds]
        kl = np.array([sample.kl for sample in recent if math.isfinite(sample.kl)])
        low, high = interval(kl)
        p50, p90, p99 = np.quantile(kl, (0.5, 0.9, 0.99)).tolist() if len(kl) else (math.nan,) * 3
        return NoiseStatistics(
            samples=len(recent),
            non_finite=len(recent) - len(kl),
            mean=float(kl.mean()) if len(kl) else math.nan,
            low=low,
            high=high,
            p50=p50,
            p90=p90,
            p99=p99,
            agreement=sum(sample.agrees for sample in recent) / len(recent) if recent else math.nan,
        )


def interval(samples: Float64) -> tuple[float, float]:
    """Two-sided 95 % confidence interval of the mean of `samples` [n], in the order in which they were taken.

    By batch means (Law & Kelton, "Simulation Modeling and Analysis", 9.5.3): the means of BATCHES stretches of equal
    length are nearly independent and normal where neighbouring samples are neither. The n mod BATCHES oldest samples
    only count for the centre. Good for a report at a moment; not for a decision that may come at any moment.
    """
    length = len(samples) // BATCHES
    if length < 2:
        return math.nan, math.nan
    means = samples[len(samples) - length * BATCHES :].reshape(BATCHES, length).mean(axis=1)
    half = STUDENT_T * float(means.std(ddof=1)) / math.sqrt(BATCHES)
    centre = float(samples.mean())
    return max(0.0, centre - half), centre + half
