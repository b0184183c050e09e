"""The scheduler fills steps up to the budget, first come first served, and lives with a pool that is too small."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dskd.config import SchedulerConfig
from dskd.engine.block_pool import BlockPool
from dskd.engine.request import GenerationRequest
from dskd.engine.scheduler import RETRY_AFTER_S, Scheduler
from dskd.engine.sequence import Chunk, Sequence
from dskd.errors import InternalError, ResourceExhaustedError
from dskquant.modes import PrecisionMode

BLOCK_SIZE = 4
MADE = 7  # the token that every step makes


def make_scheduler(
    num_blocks: int = 100,
    max_batch_tokens: int = 16,
    max_sequences: int = 8,
    max_waiting: int = 100,
    prefix_cache: bool = False,
) -> Scheduler:
    config = SchedulerConfig(max_batch_tokens, max_sequences, max_waiting, prefix_cache)
    return Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))


def make_sequence(prompt_tokens: int, max_new_tokens: int = 8, name: str = "a") -> Sequence:
    request = GenerationRequest(name, tuple(range(prompt_tokens)), max_new_tokens)
    return Sequence(request, PrecisionMode.INT4)


def add(scheduler: Scheduler, *prompt_tokens: int, max_new_tokens: int = 8) -> list[Sequence]:
    sequences = [make_sequence(tokens, max_new_tokens, str(i)) for i, tokens in enumerate(prompt_tokens)]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def run_step(scheduler: Scheduler) -> list[Chunk]:
    """One step as a step loop does it: each sequence that has its logits gets a token, the finished ones go."""
    chunks = scheduler.schedule()
    ready = [chunk.sequence for chunk in chunks if chunk.wants_logits]
    for chunk in chunks:
        scheduler.postprocess(chunk)
    for sequence in ready:
        sequence.tokens.append(MADE)
        if sequence.finish_reason:
            scheduler.remove(sequence)
    return chunks


def tokens_of(chunks: list[Chunk]) -> dict[str, int]:
    return {chunk.sequence.request.request_id: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_is_run_in_chunks_of_the_budget_and_needs_logits_only_at_its_end() -> None:
    scheduler = make_scheduler(max_batch_tokens=16)
    add(scheduler, 40)
    seen = []
    for _ in range(4):
        chunks = scheduler.schedule()
        seen += [(chunk.num_tokens, chunk.wants_logits) for chunk in chunks]
        for chunk in chunks:
            scheduler.postprocess(chunk)
            if chunk.sequence.num_uncached == 0:
                chunk.sequence.tokens.append(MADE)
    assert seen == [(16, False), (16, False), (8, True), (1, True)]


def test_running_answers_get_their_token_before_prompts_share_what_is_left() -> None:
    scheduler = make_scheduler(max_batch_tokens=16)
    add(scheduler, 3, 3)
    run_step(scheduler)
    scheduler.add(make_sequence(20, name="long"))
    assert tokens_of(scheduler.schedule()) == {"0": 1, "1": 1, "long": 14}


def test_several_prompts_share_one_step() -> None:
    scheduler = make_scheduler(max_batch_tokens=16)
    add(scheduler, 5, 5, 10)
    assert tokens_of(run_step(scheduler)) == {"0": 5, "1": 5, "2": 6}
    assert tokens_of(run_step(scheduler)) == {"0": 1, "1": 1, "2": 4}


def test_no_more_sequences_run_at_once_than_allowed() -> None:
    scheduler = make_scheduler(max_sequences=2)
    add(scheduler, 2, 2, 2)
    run_step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)


def test_small_requests_do_not_overtake_a_large_one_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, 20, 24, 2, max_new_tokens=4)  # 5 blocks, then 6 that are not there, then 1 that is
    run_step(scheduler)
    run_step(scheduler)
    assert [len(sequence.request.prompt) for sequence in scheduler.running] == [20]
    assert [len(sequence.request.prompt) for sequence in scheduler.waiting] == [24, 2]


def test_when_blocks_run_out_the_youngest_goes_back_to_the_head_of_the_line() -> None:
    scheduler = make_scheduler(num_blocks=5)
    old, young, later = add(scheduler, 7, 7, 2)  # two blocks each: one block is left, and `later` must wait for it
    run_step(scheduler)
    run_step(scheduler)
    # The ninth tokens: the last free block goes to the older one, and the younger one has to give way.
    chunks = run_step(scheduler)
    assert [chunk.sequence for chunk in chunks] == [old]
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young, later]
    assert (young.num_cached, len(young.blocks), young.preemptions) == (0, 0, 1)
    assert young.tokens == [*range(7), MADE, MADE]


def test_a_preempted_sequence_computes_its_made_tokens_again_and_goes_on_after_them() -> None:
    scheduler = make_scheduler()
    (sequence,) = add(scheduler, 3)
    for _ in range(3):
        run_step(scheduler)
    scheduler.preempt()
    chunk = scheduler.schedule()[0]
    assert (chunk.num_tokens, chunk.wants_logits) == (6, True)
    assert sequence.preemptions == 1


def test_a_newcomer_is_not_let_in_when_those_who_run_will_soon_need_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 4, 12, max_new_tokens=4)  # one block and three: all taken, and the first needs one in the next step
    run_step(scheduler)
    assert len(scheduler.running) == 1


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_is_not() -> None:
    scheduler = make_scheduler(num_blocks=2)
    scheduler.add(make_sequence(5, max_new_tokens=4))  # 8 tokens in the cache; the ninth is never written
    with pytest.raises(ResourceExhaustedError, match="needs 3 KV cache blocks of 4 tokens; there are 2") as refusal:
        scheduler.add(make_sequence(5, max_new_tokens=5))
    assert refusal.value.resource == "kv_cache"
    assert refusal.value.retry_after_s is None


def test_when_too_many_wait_the_next_one_is_told_when_to_come_back() -> None:
    scheduler = make_scheduler(max_waiting=2)
    add(scheduler, 2, 2)
    with pytest.raises(ResourceExhaustedError, match="2 requests are waiting") as refusal:
        scheduler.add(make_sequence(2))
    assert refusal.value.retry_after_s == RETRY_AFTER_S


def test_removing_gives_the_blocks_back_whether_a_sequence_runs_or_waits() -> None:
    scheduler = make_scheduler(max_sequences=1)
    running, waiting = add(scheduler, 9, 9)
    run_step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert not scheduler.has_sequences
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_the_check_finds_a_lost_block() -> None:
    scheduler = make_scheduler()
    (sequence,) = add(scheduler, 9)
    run_step(scheduler)
    scheduler.check()
    sequence.blocks = sequence.blocks[:1]
    with pytest.raises(InternalError, match="3 KV blocks are out, 1 are in use"):
        scheduler.check()


def test_the_check_finds_a_block_with_an_owner_that_does_not_run() -> None:
    scheduler = make_scheduler(prefix_cache=True)
    (sequence,) = add(scheduler, 9)
    run_step(scheduler)
    scheduler.schedule()
    assert sequence.keys is not None
    scheduler.check()
    scheduler.pool.share(sequence.keys.before_last(sequence.tokens))
    with pytest.raises(InternalError, match="other owners"):
        scheduler.check()


def test_a_prompt_whose_beginning_is_shared_needs_fewer_blocks_and_less_of_the_budget() -> None:
    scheduler = make_scheduler(num_blocks=7, max_batch_tokens=20, prefix_cache=True)
    add(scheduler, 16)
    run_step(scheduler)
    scheduler.add(make_sequence(18, name="like it"))  # five blocks; three are free, one of them not for it
    assert tokens_of(scheduler.schedule()) == {"0": 1, "like it": 2}
    assert scheduler.pool.num_free == 7 - 6


def test_blocks_that_are_kept_for_others_are_free_for_whoever_comes() -> None:
    scheduler = make_scheduler(num_blocks=4, prefix_cache=True)
    (first,) = add(scheduler, 12, max_new_tokens=4)
    run_step(scheduler)
    scheduler.remove(first)
    assert (scheduler.pool.num_free, scheduler.pool.num_published) == (4, 3)
    other = Sequence(GenerationRequest("other", tuple(range(50, 64)), 3), PrecisionMode.INT4)
    scheduler.add(other)
    assert tokens_of(run_step(scheduler)) == {"other": 14}
    scheduler.check()


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    num_blocks=st.integers(13, 30),
    budget=st.integers(4, 24),
    arrivals=st.integers(0, 6),
    prefix_cache=st.booleans(),
)
def test_every_request_ends_in_order_of_arrival_within_the_budget_and_no_block_is_lost(
    sizes: list[tuple[int, int]], num_blocks: int, budget: int, arrivals: int, prefix_cache: bool
) -> None:
    """Whatever the sizes: nobody gets a first token before somebody older, and all get the tokens they asked for.

    The prompts all begin alike, so that with a prefix cache their blocks are shared.
    """
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_batch_tokens=budget, max_sequences=4, prefix_cache=prefix_cache
    )
    sequences = [make_sequence(prompt, new, str(i)) for i, (prompt, new) in enumerate(sizes)]
    late = sequences[arrivals:]
    for sequence in sequences[:arrivals]:
        scheduler.add(sequence)
    for _ in range(3_000):
        if late:
            scheduler.add(late.pop(0))
        if not scheduler.has_sequences:
            break
        chunks = run_step(scheduler)
        assert 1 <= sum(chunk.num_tokens for chunk in chunks) <= budget
        scheduler.check()
        has_first = [len(sequence.tokens) > len(sequence.request.prompt) for sequence in sequences]
        assert has_first == sorted(has_first, reverse=True)
        open_ids = [int(sequence.request.request_id) for sequence in scheduler.sequences]
        assert open_ids == sorted(open_ids)
    assert [len(sequence.tokens) for sequence in sequences] == [prompt + new for prompt, new in sizes]
    assert scheduler.pool.num_free == num_blocks


def test_who_is_held_sits_the_step_out_and_goes_on_where_it_was() -> None:
    scheduler = make_scheduler(max_batch_tokens=16)
    answering, reading, other = add(scheduler, 3, 20, 3)
    run_step(scheduler)
    run_step(scheduler)
    cached = answering.num_cached, reading.num_cached
    assert tokens_of(scheduler.schedule({answering, reading})) == {"2": 1}
    assert (answering.num_cached, reading.num_cached) == cached
    assert set(tokens_of(scheduler.schedule())) == {"0", "1", "2"}
    assert other in scheduler.running
    scheduler.check()
