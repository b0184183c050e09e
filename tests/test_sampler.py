"""Tokens are drawn as transformers draws them: its processors are written out here anew, one by one, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dskd.engine.request import SamplingParams
from dskd.engine.sampler import (
    NUCLEUS_HEAD,
    Draw,
    NonFiniteLogitsError,
    TokenSampler,
    candidates,
    draw_tokens,
    nucleus,
    penalise,
    pick,
)
from dskquant.engines.protocol import Logits

Float64 = NDArray[np.float64]


def softmax(scores: Float64) -> Float64:
    exponentials = np.exp(scores - scores.max())
    probabilities: Float64 = exponentials / exponentials.sum()
    return probabilities


def transformers_probabilities(logits: Logits, seen: list[int], params: SamplingParams) -> Float64:
    """RepetitionPenalty-, Temperature-, TopK-, TopP- and MinP-LogitsProcessor of transformers 5.24, in its order."""
    scores = logits.astype(np.float64)
    for token in set(seen):
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    scores /= params.temperature
    if params.top_k:
        kth = sorted(scores)[-min(params.top_k, len(scores))]
        scores[scores < kth] = -np.inf
    if params.top_p < 1.0:
        ascending = np.argsort(scores, kind="stable")
        cumulative = np.cumsum(softmax(scores[ascending]))
        removed = cumulative <= 1 - params.top_p
        removed[-1] = False
        scores[ascending[removed]] = -np.inf
    if params.min_p > 0.0:
        probabilities = softmax(scores)
        scores[probabilities < params.min_p * probabilities.max()] = -np.inf
    return softmax(scores)


def our_probabilities(logits: Logits, seen: list[int], params: SamplingParams) -> Float64:
    scores = logits.astype(np.float64)
    penalise(scores, seen, params.repetition_penalty)
    ids, weights = candidates(scores, params)
    probabilities = np.zeros(len(logits))
    probabilities[ids] = weights / weights.sum()
    return probabilities


def make_logits(seed: int, size: int = 50, scale: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).normal(size=size) * scale).astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.9),
    penalty=st.floats(0.5, 2.0),
    seen=st.lists(st.integers(0, 49), max_size=12),
)
def test_the_distribution_is_that_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seen: list[int]
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty)
    logits = make_logits(seed)
    expected = transformers_probabilities(logits, seen, params)
    np.testing.assert_allclose(our_probabilities(logits, seen, params), expected, rtol=1e-9, atol=1e-12)


def test_the_temperature_comes_before_the_filters() -> None:
    """At temperature 1 the best token alone has 0.9 of the probability; at temperature 4 it takes more of them."""
    logits = np.log(np.array([0.91, 0.05, 0.03, 0.01])).astype(np.float32)
    cool = our_probabilities(logits, [], SamplingParams(temperature=1.0, top_p=0.9))
    warm = our_probabilities(logits, [], SamplingParams(temperature=4.0, top_p=0.9))
    assert np.count_nonzero(cool) == 1
    assert np.count_nonzero(warm) == 4


def test_tokens_that_tie_with_the_k_th_stay() -> None:
    logits = np.array([2.0, 1.0, 1.0, 0.0], np.float32)
    assert np.count_nonzero(our_probabilities(logits, [], SamplingParams(temperature=1.0, top_k=2))) == 3


@pytest.mark.parametrize("top_p", [0.2, 0.999])
def test_top_p_of_a_flat_distribution_reaches_beyond_the_head_that_is_sorted_first(top_p: float) -> None:
    scores = np.random.default_rng(5).uniform(0.0, 0.1, size=4 * NUCLEUS_HEAD)
    weights = np.exp(scores)
    kept = nucleus(scores, weights, top_p)
    descending = np.sort(weights)[::-1]
    count = 1 + np.count_nonzero(np.cumsum(descending) < top_p * weights.sum())
    assert weights[kept].tolist() == descending[:count].tolist()


def test_the_penalty_counts_a_token_once_and_makes_negative_scores_more_negative() -> None:
    scores = np.array([3.0, -3.0, 1.0])
    penalise(scores, [0, 1, 0, 1], 1.5)
    np.testing.assert_allclose(scores, [2.0, -4.5, 1.0])


def test_the_penalty_covers_the_prompt_and_then_each_made_token() -> None:
    logits = np.array([4.0, 3.9, 3.8, 0.0], np.float32)
    sampler = TokenSampler(SamplingParams(repetition_penalty=2.0), prompt=[0])
    assert [sampler.draw(logits).id for _ in range(3)] == [1, 2, 0]


def test_drawn_tokens_follow_the_distribution() -> None:
    """Pearson's chi-squared of 20,000 draws over 12 tokens; 38.2 is passed once in 10,000 seeds (11 degrees)."""
    logits = make_logits(3, size=12, scale=1.0)
    params = SamplingParams(temperature=0.8, seed=17)
    sampler = TokenSampler(params, prompt=[])
    counts = np.bincount([sampler.draw(logits).id for _ in range(20_000)], minlength=12)
    expected = transformers_probabilities(logits, [], params) * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 38.2


def test_filtered_tokens_are_never_drawn() -> None:
    logits = make_logits(4)
    params = SamplingParams(temperature=2.0, top_k=20, top_p=0.8, min_p=0.1, seed=1)
    allowed = set(np.flatnonzero(transformers_probabilities(logits, [], params)).tolist())
    sampler = TokenSampler(params, prompt=[])
    assert {sampler.draw(logits).id for _ in range(2_000)} == allowed


@pytest.mark.parametrize("share", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_no_random_number_picks_a_token_of_weight_zero(share: float) -> None:
    weights = np.array([0.0, 0.1, 0.0, 0.1, 0.0, 0.0])
    assert weights[pick(weights, share)] > 0


def test_an_answer_depends_on_its_seed_and_not_on_the_company_in_the_batch() -> None:
    rows = np.stack([make_logits(seed) for seed in range(30)])
    params = SamplingParams(temperature=1.5, seed=11)
    alone, in_company = TokenSampler(params, []), TokenSampler(params, [])
    company = [TokenSampler(SamplingParams(temperature=1.0, seed=seed), []) for seed in range(3)]
    by_itself = [draw_tokens(row[None], [alone])[0] for row in rows]
    together = [draw_tokens(np.stack([row] * 4), [*company, in_company])[3] for row in rows]
    other_seed = TokenSampler(SamplingParams(temperature=1.5, seed=12), [])
    assert by_itself == together
    assert by_itself != [other_seed.draw(row) for row in rows]


def test_greedy_rows_get_the_most_probable_token() -> None:
    rows = np.stack([make_logits(seed) for seed in range(8)])
    samplers = [TokenSampler(SamplingParams(), []) for _ in rows]
    assert draw_tokens(rows, samplers) == [Draw(max(range(50), key=row.__getitem__)) for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300])
def test_logits_at_the_edge_of_float32_are_drawn_from_without_overflow(temperature: float) -> None:
    logits = np.array([[-3.4e38, 3.4e38, 0.0, 1e-38]], np.float32)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    assert draw_tokens(logits, [TokenSampler(params, [], top_logprobs=1)]) == [Draw(1, 0.0, ((1, 0.0),))]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    rows = np.stack([make_logits(seed) for seed in range(3)])
    rows[1, 20] = bad
    samplers = [TokenSampler(SamplingParams(temperature=temperature, top_k=1), []) for _ in rows]
    drawn = draw_tokens(rows, samplers)
    assert isinstance(drawn[1], NonFiniteLogitsError)
    assert [drawn[0], drawn[2]] == [Draw(int(rows[0].argmax())), Draw(int(rows[2].argmax()))]


def test_log_probabilities_are_those_of_the_model_before_any_filter() -> None:
    logits = make_logits(9)
    params = SamplingParams(temperature=0.3, top_k=1, repetition_penalty=3.0)
    draw = TokenSampler(params, prompt=[int(logits.argmax())], top_logprobs=4).draw(logits)
    logprobs = np.log(softmax(logits.astype(np.float64)))
    best = sorted(range(50), key=lambda token: -logits[token])[:4]
    assert draw.id != best[0]
    assert draw.logprob == pytest.approx(logprobs[draw.id])
    assert [token for token, _ in draw.top_logprobs] == best
    assert [value for _, value in draw.top_logprobs] == pytest.approx([logprobs[token] for token in best])


def test_more_log_probabilities_than_tokens_gives_all_tokens() -> None:
    draw = TokenSampler(SamplingParams(), [], top_logprobs=20).draw(make_logits(1, size=5))
    assert len(draw.top_logprobs) == 5
    assert sum(np.exp(value) for _, value in draw.top_logprobs) == pytest.approx(1.0)
