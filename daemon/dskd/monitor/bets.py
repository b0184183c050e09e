"""A sequential test of a mean that may be looked at after every sample: evidence by betting.

To find out whether the mean of non-negative samples X is above a threshold c, bet against "it is not":

    L_i = 1 + b (X_i / c - 1),   0 < b < 1.

While the mean is at most c, E[L_i] <= 1 whatever the distribution, however heavy its tail: no bet makes money on
average (Waudby-Smith & Ramdas 2023, "Estimating means of bounded random variables by betting"). By Ville's inequality
the product of L ever passes 1 / alpha with probability alpha at most, and that it does is the same as that the lower
end of the betting confidence sequence for the mean passes c. So peeking inflates nothing, and no decision on few
samples follows: even the loudest need ln(1 / alpha) / ln(max L) of them. Samples may depend on those before, as long as
the mean to be expected after them is at most c.

A mode that was healthy for long and goes bad must not first win back what the bets lost: wealth starts anew from 1,

    M_i = max(M_{i-1}, 1) L_i,

the e-detector of Shin, Ramdas & Rinaldo 2022 ("E-detectors: a nonparametric framework for sequential change
detection"), which is Page's CUSUM with bets in place of likelihood ratios. The mean number of samples until M >= A is
at least A even when the mean sits exactly on the threshold, and grows exponentially as it sinks below. Which b wins
most depends on how the noise looks: the wealth is spread evenly over several.

X is clipped at `CAP` thresholds, so that no single outlier decides. That only lowers the mean, and a test for a rise
stays valid. A test for a fall bets with b < 0, down to -1 / (CAP - 1); it is the clipped mean that it speaks of.
"""

from __future__ import annotations

import math
from statistics import NormalDist

CAP = 10.0
RISE_BETS = (0.5, 0.25, 0.125, 0.0625, 0.03125)
FALL_BETS = tuple(-stake / (CAP - 1.0) for stake in (0.9, 0.5, 0.25))

TYPICAL_SIGMA = 0.8
"""Of a lognormal distribution that trips as soon as measured KL does: SmolLM2-135M on prose, INT4 and INT8 alike.

Its KL has a standard deviation of 0.8 to 0.9 times and a 99th percentile of 3.6 to 4.3 times its mean.
"""

_QUADRATURE_POINTS = 2000


class MeanDetector:
    """Evidence that the mean of samples is on the other side of a threshold, since whichever sample that began."""

    def __init__(self, threshold: float, bets: tuple[float, ...]) -> None:
        """`threshold` is above 0; `RISE_BETS` look for a mean above it, `FALL_BETS` for one below."""
        self._threshold = threshold
        self._bets = bets
        self._logs = (0.0,) * len(bets)

    def push(self, sample: float) -> None:
        """Takes a sample of at least 0; infinity is allowed."""
        excess = min(sample / self._threshold, CAP) - 1.0
        self._logs = tuple(
            [max(log, 0.0) + math.log1p(bet * excess) for log, bet in zip(self._logs, self._bets, strict=True)]
        )

    @property
    def evidence(self) -> float:
        """ln M: 0 or less says nothing, ln A that a false alarm comes after A samples on average at worst."""
        highest = max(self._logs)
        return highest + math.log(sum(math.exp(log - highest) for log in self._logs) / len(self._logs))


def samples_to_trip(mean_kl: float, threshold: float, false_trip_samples: float, sigma: float = TYPICAL_SIGMA) -> float:
    """Samples from when the noise has risen to `mean_kl` until the evidence is ln `false_trip_samples`, on average.

    For KL with a lognormal distribution, `sigma` the standard deviation of its logarithm. With the best bet the
    evidence grows by E[ln L] a sample, from -ln(number of bets): Wald's equation, the overshoot left out. Infinity when
    it does not grow. Divide by the share of tokens that is scored to get tokens.
    """
    points = _lognormal(mean_kl / threshold, sigma)
    growth = max(math.fsum(math.log1p(bet * (min(x, CAP) - 1.0)) for x in points) / len(points) for bet in RISE_BETS)
    return math.log(false_trip_samples * len(RISE_BETS)) / growth if growth > 0 else math.inf


def _lognormal(mean: float, sigma: float) -> list[float]:
    """Equally probable values of a lognormal distribution with that mean."""
    normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    return [math.exp(normal.inv_cdf((i + 0.5) / _QUADRATURE_POINTS)) for i in range(_QUADRATURE_POINTS)]
