"""How far the answers of one mode are from those of the reference.

Kullback-Leibler divergence KL(P || Q) = sum_i P_i (ln P_i - ln Q_i) in nats, P the reference's and Q the served mode's
distribution of the next token over the whole vocabulary, one figure a position, and whether both have the same most
probable token. Definitions as in llama.cpp's perplexity tool with `--kl-divergence`; typical means there are 0.0004 to
0.0008 for Q8_0, 0.013 to 0.031 for Q4_K_M and 0.07 for plain 4 bit, more for small models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def log_softmax(logits: NDArray[Any]) -> Float64:
    """Natural logarithms of the probabilities, over the last axis, in float64."""
    shifted: Float64 = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(reference: Float64, served: Float64) -> Float64:
    """KL(reference || served) in nats of each row; both are log-probabilities [..., V]. Never negative."""
    divergence: Float64 = (np.exp(reference) * (reference - served)).sum(axis=-1)
    # the sum of rounding errors of a divergence near zero may fall below it
    return np.maximum(divergence, 0.0)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Distance between two runs over the same positions."""

    positions: int
    mean_kl: float
    max_kl: float
    agreement: float  # share of positions with the same most probable token
    finite: bool

    @classmethod
    def between(cls, reference: NDArray[Any], served: NDArray[Any]) -> Divergence:
        """Of the logits [positions, V] of the reference and of the served mode."""
        if not (np.isfinite(reference).all() and np.isfinite(served).all()):
            return cls(len(served), float("inf"), float("inf"), 0.0, finite=False)
        kl = kl_divergence(log_softmax(reference), log_softmax(served))
        same = reference.argmax(axis=-1) == served.argmax(axis=-1)
        return cls(len(served), float(kl.mean()), float(kl.max()), float(same.mean()), finite=True)
