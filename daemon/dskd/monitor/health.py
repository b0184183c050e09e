"""Signs of trouble in single tokens, from the logits that were computed anyway.

Reading every logit of every row three times over would cost more than 1 % of a step (2.2 ms for 8 x 151,936 logits), so
steps look at as many rows as hold `LOGITS_PER_STEP` logits on average, and the rows take turns.
Whether all rows are finite is known already: drawing a token says so.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOGITS_PER_STEP = 1 << 14
"""Some 0.04 ms on one core, whose caches hold weights after a step."""

NEGLIGIBLE = -80.0
"""ln of a share of the greatest probability that adds nothing; below -87 float32 goes denormal, ten times slower."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenHealth:
    """How sure a mode was of one token."""

    finite: bool
    entropy: float  # of the distribution, nats: 0 to ln(vocabulary); NaN unless finite
    margin: float  # the greatest logit less the second one, which is ln(p1 / p2); NaN unless finite


NOT_FINITE = TokenHealth(finite=False, entropy=math.nan, margin=math.nan)


class HealthProbe:
    """Looks at a few rows of each step. It keeps two rows of scratch memory and belongs to one thread."""

    def __init__(self, vocabulary: int) -> None:
        """`vocabulary` is the number of logits of a row, at least 2."""
        self._vocabulary = vocabulary
        self._due = max(vocabulary, LOGITS_PER_STEP)  # logits that may be read by now
        self._shifted = np.empty(vocabulary, np.float32)
        self._weights = np.empty(vocabulary, np.float32)
        self._next = 0

    def step(self, logits: Float32) -> Iterator[tuple[int, TokenHealth]]:
        """Indices and health of the rows of `logits` [S, vocabulary] whose turn it is."""
        count = min(self._due // self._vocabulary, len(logits))
        self._due = min(self._due - count * self._vocabulary, self._vocabulary) + LOGITS_PER_STEP
        for turn in range(self._next, self._next + count):
            row = turn % len(logits)
            yield row, self.measure(logits[row])
        # never wrapped here: the number of rows changes from step to step
        self._next += count

    def measure(self, row: Float32) -> TokenHealth:
        """Health of one row [vocabulary].

        With s = x - max(x), e = exp(s), z = sum e: entropy = ln z - (sum e * s) / z. Sums of float32 products by dot
        products, which accumulate in many lanes: the error stays below 1e-4 nats for 150,000 logits.
        """
        best = int(row.argmax())  # that of a NaN, if there is one
        if not math.isfinite(row[best]):
            return NOT_FINITE
        shifted = np.subtract(row, row[best], out=self._shifted)
        lowest = float(shifted.min())
        if not math.isfinite(lowest):
            return NOT_FINITE
        shifted[best] = -np.inf
        margin = -float(shifted.max())
        shifted[best] = 0.0
        if lowest < NEGLIGIBLE:
            np.maximum(shifted, NEGLIGIBLE, out=shifted)
        weights = np.exp(shifted, out=self._weights)
        total = float(weights.sum())
        entropy = math.log(total) - float(weights.dot(shifted)) / total
        return TokenHealth(True, max(0.0, entropy), margin)


class Repetition:
    """Share of different n-grams among the recent tokens of a sequence: near 1 in prose, near 0 in a loop."""

    def __init__(self, n: int = 3, window: int = 64) -> None:
        """Looks at the last `window` n-grams of `n` tokens."""
        self._recent: deque[int] = deque(maxlen=n)
        self._grams: deque[tuple[int, ...]] = deque()
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._window = window

    def push(self, token: int) -> None:
        """Takes the next token of the sequence, in constant time."""
        self._recent.append(token)
        if len(self._recent) < (self._recent.maxlen or 0):
            return
        gram = tuple(self._recent)
        self._grams.append(gram)
        self._counts[gram] += 1
        if len(self._grams) > self._window:
            self._forget(self._grams.popleft())

    @property
    def unique_ratio(self) -> float:
        """Different n-grams over all n-grams of the window; 1 before there is one."""
        return len(self._counts) / len(self._grams) if self._grams else 1.0

    def _forget(self, gram: tuple[int, ...]) -> None:
        self._counts[gram] -= 1
        if not self._counts[gram]:
            del self._counts[gram]
