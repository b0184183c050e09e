"""Shadow scoring: which made tokens the reference scores too, and how far the served mode was from it there."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.divergence import Float64, kl_divergence, log_softmax

BUDGET_DEPTH_S = 1.0
"""Time that scoring may have saved up: what a quiet hour left unused is not spent in one burst."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of n positions; arrays [n]. A position where either side is not finite has KL infinity and does not agree."""

    kl: Float64  # KL(reference || served), nats
    agrees: NDArray[np.bool_]  # both have the same most probable token
    rank: NDArray[np.int64]  # tokens that the reference finds more probable than the served one
    finite: NDArray[np.bool_]  # both sides are


def score(reference: NDArray[Any], served: NDArray[Any], tokens: NDArray[np.integer[Any]]) -> Scores:
    """Compares the logits [n, V] of both modes at the same positions; `tokens` [n] are those that were served.

    Definitions and typical values as in llama.cpp's perplexity tool with `--kl-divergence` (see `dskquant.divergence`):
    mean KL 0.0004 to 0.0008 for Q8_0, 0.013 to 0.031 for Q4_K_M, 0.07 for plain 4 bit, more for small models.
    Float64 throughout, row by row: that keeps the scratch memory inside the caches.
    """
    rows = [_score_row(*row) for row in zip(reference, served, tokens.tolist(), strict=True)]
    kl, agrees, rank, finite = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Scores(
        np.array(kl, np.float64), np.array(agrees, np.bool_), np.array(rank, np.int64), np.array(finite, np.bool_)
    )


def _score_row(reference: NDArray[Any], served: NDArray[Any], token: int) -> tuple[float, bool, int, bool]:
    rank = int(np.count_nonzero(reference > reference[token]))
    if not (np.isfinite(reference).all() and np.isfinite(served).all()):
        return math.inf, False, rank, False
    kl = float(kl_divergence(log_softmax(reference), log_softmax(served)))
    return kl, bool(reference.argmax() == served.argmax()), rank, True


def phase_of(key: str) -> float:
    """A number in [0, 1) that is the same for the same `key` in every run and process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


def is_sampled(phase: float, position: int, share: float) -> bool:
    """Whether the token at `position` of the sequence with that phase (see `phase_of`) is scored.

    Every 1 / `share`-th token is, on average exactly, never two within floor(1 / share) tokens; the phase moves the
    first one, so that every position is as likely as any other, and sequences that started together do not meet.
    """
    return math.floor(phase + (position + 1) * share) > math.floor(phase + position * share)


class TimeBudget:
    """Keeps the time spent on scoring within a share of the loop's time. No clock of its own."""

    def __init__(self, share: float) -> None:
        """`share` is between 0 and 1."""
        self._share = share
        self._saved_s = 0.0
        self._last_s = 0.0  # what scoring took last is what it will take

    def earn(self, loop_s: float) -> None:
        """Counts `loop_s` seconds that the loop ran, scoring included."""
        self._saved_s = min(self._saved_s + self._share * loop_s, max(BUDGET_DEPTH_S, self._last_s))

    def spend(self, scoring_s: float) -> None:
        """Counts seconds that scoring took."""
        self._saved_s -= scoring_s
        self._last_s = scoring_s

    @property
    def allows(self) -> bool:
        """Whether scoring may go on: what it will take has been earned."""
        return self._saved_s > 0.0 and self._saved_s >= self._last_s
