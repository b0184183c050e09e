"""Draws the next tokens from logits.

Order of the filters, as in Hugging Face transformers 5 (`GenerationMixin._get_logits_processor`): repetition penalty,
temperature, top-k, top-p, min-p. (llama.cpp applies the temperature last; top-p then means something else.)
Sources: repetition penalty, Keskar et al. 2019 (CTRL), over prompt and made tokens; top-p, Holtzman et al. 2020;
min-p, Nguyen et al. 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dskd.engine.request import SamplingParams
from dskquant.engines.protocol import Logits

Float64 = NDArray[np.float64]
Ids = NDArray[np.intp]

NUCLEUS_HEAD = 1024
"""As many of the likeliest tokens are sorted for top-p at first; the whole vocabulary only if they do not suffice."""


class NonFiniteLogitsError(ArithmeticError):
    """A row of logits holds NaN or infinity; nothing can be drawn from it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token. Log-probabilities are those of the bare model: before penalty, temperature and filters."""

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most probable first


class TokenSampler:
    """Draws the tokens of one request; its random numbers are its own, whatever else is in the batch."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], top_logprobs: int = 0) -> None:
        self._params = params
        self._top_logprobs = top_logprobs
        self._seen = list(prompt) if params.repetition_penalty != 1.0 else []
        self.is_plain = params.temperature == 0.0 and params.repetition_penalty == 1.0 and top_logprobs == 0

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._params.seed))

    def draw(self, logits: Logits) -> Draw:
        """The next token from its finite logits [vocabulary]."""
        token = self._choose(logits.astype(np.float64))
        if self._top_logprobs == 0:
            return Draw(token)
        logprobs = log_softmax(logits)
        top = greatest(logprobs, self._top_logprobs)
        return Draw(token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True)))

    def _choose(self, scores: Float64) -> int:
        penalty = self._params.repetition_penalty
        if penalty != 1.0:
            penalise(scores, self._seen, penalty)
        if self._params.temperature == 0.0:
            token = int(scores.argmax())
        else:
            ids, weights = candidates(scores, self._params)
            token = int(ids[pick(weights, self._random.random())])
        if penalty != 1.0:
            self._seen.append(token)
        return token


def draw_tokens(logits: Logits, samplers: Sequence[TokenSampler]) -> list[Draw | NonFiniteLogitsError]:
    """Draws one token per row of `logits` [S, vocabulary] with the sampler of the same index.

    A row that is not finite has the error in its place and leaves the others alone.
    """
    return [_draw_one(row, sampler) for row, sampler in zip(logits, samplers, strict=True)]


def _draw_one(row: Logits, sampler: TokenSampler) -> Draw | NonFiniteLogitsError:
    # argmax and min both stop at NaN, so these two values tell whether the whole row is finite.
    best = int(row.argmax())
    if not (math.isfinite(row[best]) and math.isfinite(row.min())):
        return NonFiniteLogitsError()
    return Draw(best) if sampler.is_plain else sampler.draw(row)


def penalise(scores: Float64, seen: Sequence[int], penalty: float) -> None:
    """Divides the positive and multiplies the negative scores of `seen` tokens by `penalty`, each once, in place."""
    ids = np.array(seen, np.int64)
    # Gathered before any is written: an id that occurs twice is penalised once.
    found = scores[ids]
    scores[ids] = np.where(found < 0, found * penalty, found / penalty)


def candidates(scores: Float64, params: SamplingParams) -> tuple[Ids, Float64]:
    """The tokens [C] that the filters leave, and how likely each is to be drawn: 1 for the likeliest, no sum of 1.

    `scores` [vocabulary] are the logits after the repetition penalty; the temperature is not 0.
    """
    ids = top_k_ids(scores, params.top_k) if 0 < params.top_k < len(scores) else np.arange(len(scores))
    scores = scores[ids]
    # Whatever is too unlikely for a float64 at this temperature has weight 0.
    with np.errstate(over="ignore", under="ignore"):
        weights: Float64 = np.exp((scores - scores.max()) / params.temperature)
    if params.top_p < 1.0:
        kept = nucleus(scores, weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    is_likely = weights >= params.min_p  # the greatest weight is 1
    return ids[is_likely], weights[is_likely]


def top_k_ids(scores: Float64, k: int) -> Ids:
    """The tokens of the k greatest scores, and those that tie with the k-th."""
    return np.flatnonzero(scores >= np.partition(scores, -k)[-k])


def nucleus(scores: Float64, weights: Float64, p: float) -> Ids:
    """Indices of the smallest set of the likeliest tokens that has the share `p` of the sum of `weights`.

    `weights` grow with `scores`, which unlike them do not all become 0 at low temperatures: ties are slow to partition.
    """
    wanted = p * weights.sum()
    order = greatest(scores, NUCLEUS_HEAD)
    if weights[order].sum() < wanted:
        order = greatest(scores, len(scores))
    count = int(weights[order].cumsum().searchsorted(wanted)) + 1
    return order[:count]


def pick(weights: Float64, share: float) -> int:
    """Index at which the running sum of `weights` passes `share` (in [0, 1)) of their total."""
    cumulative = weights.cumsum()
    # The product stays below the total even when rounded: `share` is at most 1 - 2**-53.
    return int(cumulative.searchsorted(share * cumulative[-1], side="right"))


def greatest(values: Float64, count: int) -> Ids:
    """Indices [min(count, len(values))] of the greatest values, the greatest first."""
    if count < len(values):
        ids = np.argpartition(values, -count)[-count:]
        return ids[np.argsort(values[ids])[::-1]]
    return np.argsort(values)[::-1]


def log_softmax(logits: Logits) -> Float64:
    """Log-probabilities [vocabulary] in nats."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Float64 = shifted - np.log(np.exp(shifted).sum())
    return result
