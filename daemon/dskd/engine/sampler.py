"""Draws the next tokens from logits.

Order of the filters, as in Hugging Face transformers 5 (`GenerationMixin._get_logits_processor`): repetition penalty,
temperature, top-k, top-p, min-p. (llama.cpp applies the temperature last; top-p then means something else.)
Sources: repetition penalty, Keskar et al. 2019 (CTRL), over prompt and made tokens; top-p, Holtzman et al. 2020;
min-p, Nguyen et al. 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dskd.engine.request import SamplingParams
from dskquant.engines.protocol import Logits

Float64 = NDArray[np.float64]

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
        scores: Float64 = logits.astype(np.float64)
        penalty = self._params.repetition_penalty
        if penalty != 1.0:
            penalise(scores, self._seen, penalty)
        greedy = self._params.temperature == 0.0
        token = int(scores.argmax()) if greedy else pick(token_weights(scores, self._params), self._random.random())
        if penalty != 1.0:
            self._seen.append(token)
        if self._top_logprobs == 0:
            return Draw(token)
        logprobs = log_softmax(logits)
        top = heaviest(logprobs, self._top_logprobs)
        return Draw(token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True)))


def draw_tokens(logits: Logits, samplers: Sequence[TokenSampler]) -> list[Draw | NonFiniteLogitsError]:
    """Draws one token per row of `logits` [S, vocabulary] with the sampler of the same index.

    A row that is not finite has the error in its place and leaves the others alone.
    """
    # argmax and min both stop at NaN, so these two values tell whether a whole row is finite.
    best = logits.argmax(axis=1)
    highest = logits[np.arange(len(best)), best]
    is_finite = np.isfinite(highest) & np.isfinite(logits.min(axis=1))
    return [
        (Draw(token) if sampler.is_plain else sampler.draw(row)) if finite else NonFiniteLogitsError()
        for token, finite, row, sampler in zip(best.tolist(), is_finite.tolist(), logits, samplers, strict=True)
    ]


def token_weights(scores: Float64, params: SamplingParams) -> Float64:
    """How likely each token is to be drawn [vocabulary]: 1 for the likeliest, 0 for what is filtered out; no sum of 1.

    `scores` are the logits after the repetition penalty; the temperature is not 0.
    """
    # Whatever is too unlikely for a float64 at this temperature has weight 0.
    with np.errstate(over="ignore", under="ignore"):
        weights: Float64 = np.exp((scores - scores.max()) / params.temperature)
    if 0 < params.top_k < len(weights):
        weights = keep_top_k(weights, params.top_k)
    if params.top_p < 1.0:
        weights = keep_top_p(weights, params.top_p)
    return np.where(weights >= params.min_p, weights, 0.0)  # the greatest weight is 1


def pick(weights: Float64, share: float) -> int:
    """The token at which the running sum of `weights` passes `share` (in [0, 1)) of their total."""
    cumulative = weights.cumsum()
    # Below the total even if the product is rounded up, so that no token of weight 0 is picked.
    point = min(share * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
    return int(cumulative.searchsorted(point, side="right"))


def penalise(scores: Float64, seen: Sequence[int], penalty: float) -> None:
    """Divides the positive and multiplies the negative scores of `seen` tokens by `penalty`, each once, in place."""
    ids = np.array(seen, np.int64)
    # Gathered before any is written: an id that occurs twice is penalised once.
    found = scores[ids]
    scores[ids] = np.where(found < 0, found * penalty, found / penalty)


def keep_top_k(weights: Float64, k: int) -> Float64:
    """`weights` with all but the k greatest set to 0; those that tie with the k-th stay."""
    kth = np.partition(weights, -k)[-k]
    return np.where(weights >= kth, weights, 0.0)


def keep_top_p(weights: Float64, p: float) -> Float64:
    """`weights` with 0 outside the smallest set of the likeliest tokens that has the share `p` of the total."""
    wanted = p * weights.sum()
    order = heaviest(weights, NUCLEUS_HEAD)
    if weights[order].sum() < wanted:
        order = heaviest(weights, len(weights))
    count = int(weights[order].cumsum().searchsorted(wanted)) + 1
    kept = np.zeros_like(weights)
    kept[order[:count]] = weights[order[:count]]
    return kept


def heaviest(values: Float64, count: int) -> NDArray[np.intp]:
    """Indices [min(count, len(values))] of the greatest values, the greatest first."""
    count = min(count, len(values))
    candidates = np.argpartition(values, -count)[-count:]
    return candidates[np.argsort(-values[candidates], kind="stable")]


def log_softmax(logits: Logits) -> Float64:
    """Log-probabilities [vocabulary] in nats."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Float64 = shifted - np.log(np.exp(shifted).sum())
    return result
