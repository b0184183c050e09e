"""Prompts that begin alike share what is in the cache, and nothing written by another mode or generation is reused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import pytest
from fakes import FakeCache, FakeGraph, assert_right_answer, toy_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from dskd.config import SchedulerConfig
from dskd.engine.block_keys import BlockKeys
from dskd.engine.request import FinishReason, GenerationRequest, InFlight, MadeToken, StepOutput
from dskd.engine.scheduler import Scheduler
from dskd.engine.sequence import Chunk, Sequence
from dskd.engine.step_loop import StepLoop
from dskquant.engines.protocol import GRAPH_GROUPS, Logits, StepBatch, graph_key
from dskquant.modes import LADDER, PrecisionMode

INT4, INT8, FP16, FP32 = LADDER
PROMPT = tuple(range(10, 23))  # three full blocks of four tokens, and one token
Label = tuple[PrecisionMode, int]
T = TypeVar("T")


class SignedCache(FakeCache):
    """Also holds who wrote each token."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.writers = np.full((num_blocks, self.block_size), None, object)


class SignedGraph(FakeGraph):
    """Signs what it writes with mode and generation."""

    _cache: SignedCache

    def run(self, batch: StepBatch) -> Logits:
        for b, past in enumerate(batch.past_lens.tolist()):
            begin, end = batch.subsequence_begins[b : b + 2].tolist()
            first_block = int(batch.block_indices_begins[b])
            for position, row in enumerate(range(begin, end), past):
                block = batch.block_indices[first_block + position // self._cache.block_size]
                in_int8 = row in batch.residual_rows
                mode = INT8 if in_int8 else min(self.modes, key=LADDER.index)
                self._cache.writers[block, position % self._cache.block_size] = (mode, self.generation)
        return super().run(batch)


class Bench:
    """A step loop over a toy model with a signed cache, driven step by step. It knows who must have written what.

    `writers` tells of each open request, for each of its tokens in the cache, what wrote it: what serves the request in
    the step that computes it, or, if it was not computed, what served it when it was let in.
    """

    def __init__(self, num_blocks: int = 64, **config: Any) -> None:
        self.cache = SignedCache(num_blocks)
        self.outputs: dict[str, list[StepOutput]] = defaultdict(list)
        self.loop = StepLoop(
            model="toy",
            engine_name="fake",
            cache=self.cache,
            config=SchedulerConfig(**config),
            mode=INT4,
            generation=1,
            deliver=lambda outputs: [self.outputs[output.request_id].append(output) for output in outputs],
        )
        self.graphs: dict[tuple[int, frozenset[PrecisionMode]], SignedGraph] = {}
        for group in GRAPH_GROUPS:
            self.install(1, group)
        self.writers: dict[str, list[Label]] = {}
        self.reused: dict[str, int] = {}  # tokens found at the first admission
        self._preemptions: dict[str, int] = {}
        self._watch()

    @property
    def scheduler(self) -> Scheduler:
        return self.loop._core._scheduler

    def _watch(self) -> None:
        """Notes the chunks of each step."""
        schedule = self.scheduler.schedule

        def watched(held: Collection[Sequence] = ()) -> list[Chunk]:
            chunks = schedule(held)
            for chunk in chunks:
                self._note(chunk)
            return chunks

        self.scheduler.schedule = watched  # type: ignore[method-assign]

    def _note(self, chunk: Chunk) -> None:
        sequence, name = chunk.sequence, chunk.sequence.request.request_id
        label = (sequence.mode, sequence.generation)
        if self._preemptions.get(name) != sequence.preemptions:  # let in, for the first time or again
            self._preemptions[name] = sequence.preemptions
            self.writers[name] = [label] * sequence.num_cached
            self.reused.setdefault(name, sequence.num_cached)
        self.writers[name] += [label] * chunk.num_tokens

    def install(self, generation: int, group: Collection[PrecisionMode]) -> None:
        graph = SignedGraph(group, generation)
        graph.bind(self.cache)
        self.now(self.loop.install(generation, graph))
        self.graphs[generation, graph.modes] = graph

    def now(self, future: Future[T]) -> T:
        self.loop.apply_commands()
        return future.result(timeout=0)

    def submit(self, name: str, prompt: tuple[int, ...] = PROMPT, new: int = 4, **options: Any) -> GenerationRequest:
        request = GenerationRequest(name, prompt, new, **options)
        self.now(self.loop.submit(request))
        return request

    def flip(self, mode: PrecisionMode, generation: int = 1, in_flight: InFlight = InFlight.MIGRATE) -> None:
        self.now(self.loop.flip(mode, generation, in_flight))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.run_one_step()
            self.check()

    def run_all(self) -> None:
        while self.loop.snapshot().running + self.loop.snapshot().waiting:
            self.step()

    def run(self, name: str, prompt: tuple[int, ...] = PROMPT, new: int = 4, **options: Any) -> int:
        """Runs one request to its end, whose answer must be right; the number of tokens it did not compute."""
        self.submit(name, prompt, new, **options)
        self.run_all()
        assert_right_answer(prompt, self.tokens(name))
        assert len(self.tokens(name)) == new
        return self.reused[name]

    def tokens(self, name: str) -> list[MadeToken]:
        return [token for output in self.outputs[name] for token in output.tokens]

    def ids(self, name: str) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens(name))

    def check(self) -> None:
        """The cache holds, for every running request, its own tokens written by what should have written them."""
        self.scheduler.check()
        for sequence in self.scheduler.running:
            cached = sequence.num_cached
            assert self.cache.tokens[sequence.blocks].reshape(-1)[:cached].tolist() == sequence.tokens[:cached]
            writers = self.cache.writers[sequence.blocks].reshape(-1)[:cached].tolist()
            assert writers == self.writers[sequence.request.request_id]


# Reuse


def test_a_prompt_that_was_answered_before_is_computed_from_its_last_block_on() -> None:
    bench = Bench()
    assert bench.run("first") == 0
    bench.graphs[1, graph_key(INT4)].batches.clear()
    assert bench.run("second") == 12
    first_batch = bench.graphs[1, graph_key(INT4)].batches[0]
    assert (first_batch.past_lens.tolist(), first_batch.token_ids.tolist()) == ([12], [PROMPT[-1]])
    assert bench.ids("second") == bench.ids("first")


@pytest.mark.parametrize(("length", "reused"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_only_full_blocks_are_reused_and_a_token_is_always_left_to_compute(length: int, reused: int) -> None:
    bench = Bench()
    bench.run("first")
    assert bench.run("second", PROMPT[:length]) == reused


def test_prompts_share_as_many_blocks_as_they_begin_alike() -> None:
    bench = Bench()
    bench.run("first")
    assert bench.run("second", (*PROMPT[:9], 1, 1, 1, 1)) == 8
    assert bench.run("third", (1, *PROMPT[1:])) == 0


def test_an_answer_is_reused_by_the_prompt_that_continues_it() -> None:
    bench = Bench()
    bench.run("question", PROMPT, new=12)  # 24 tokens are cached, the last one made is not
    assert bench.run("next question", (*PROMPT, *bench.ids("question"), 1, 2)) == 24


def test_a_request_that_comes_while_another_runs_shares_its_blocks_and_outlives_it() -> None:
    bench = Bench()
    bench.submit("first", new=20)
    bench.step()
    bench.submit("second", new=9)
    bench.step()
    assert bench.reused["second"] == 12
    first, second = bench.scheduler.running
    assert first.blocks[:3].tolist() == second.blocks[:3].tolist()
    assert bench.loop.snapshot().blocks_free == 64 - 5, "three blocks have two owners, and each has one of its own"
    bench.now(bench.loop.cancel("first"))
    bench.run_all()
    assert_right_answer(PROMPT, bench.tokens("second"))


def test_a_sequence_knows_how_much_of_its_prompt_it_found() -> None:
    bench = Bench()
    bench.run("first")
    bench.submit("second", new=8)
    bench.step(4)
    (sequence,) = bench.scheduler.running
    assert sequence.num_reused == 12
    bench.scheduler.preempt()
    bench.step()
    assert (sequence.num_reused, sequence.num_cached) == (12, 17), "the 16 it then finds are its own"


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    bench = Bench()
    bench.submit("a", new=8)
    bench.step(4)
    bench.scheduler.preempt()
    graph = bench.graphs[1, graph_key(INT4)]
    bench.step()
    assert (graph.batches[-1].past_lens.tolist(), len(graph.batches[-1].token_ids)) == ([16], 1)
    bench.run_all()
    assert_right_answer(PROMPT, bench.tokens("a"))


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    bench = Bench(prefix_cache=False)
    assert bench.run("first") == bench.run("second") == 0
    assert bench.scheduler.pool.num_published == 0


# What is not reused


@pytest.mark.parametrize("other", [INT8, FP16, FP32])
def test_what_one_mode_has_written_is_not_reused_by_another(other: PrecisionMode) -> None:
    bench = Bench()
    assert bench.run("first") == 0
    assert bench.run("other", precision=other) == 0
    assert bench.run("other again", precision=other) == 12
    assert bench.run("first again") == 12


def test_what_an_old_generation_has_written_is_not_reused_by_a_new_one_and_is_after_a_rollback() -> None:
    bench = Bench()
    bench.install(2, graph_key(INT4))
    bench.run("old")
    bench.flip(INT4, 2)
    assert bench.run("new") == 0
    bench.flip(INT4, 1)
    assert bench.run("old again") == 12


def test_after_a_flip_in_mid_answer_only_what_was_written_before_it_is_reused() -> None:
    bench = Bench()
    bench.submit("a", new=20)
    bench.step(5)  # 17 tokens in the cache
    bench.flip(FP32)
    bench.step()
    bench.flip(INT4)
    bench.run_all()
    whole = (*PROMPT, *bench.ids("a"))
    assert bench.run("in int4", whole) == 16
    assert bench.run("in fp32", whole, precision=FP32) == 0


def test_a_prompt_that_two_modes_have_read_is_not_reused() -> None:
    bench = Bench(max_batch_tokens=6, max_sequences=1)
    bench.submit("a")
    bench.step()
    bench.flip(INT8)
    bench.run_all()
    assert bench.run("in int8") == 0
    assert bench.run("in int4", precision=INT4) == 0


def test_a_request_that_waits_looks_for_what_serves_it_when_its_turn_comes() -> None:
    bench = Bench(max_sequences=1)
    bench.run("in fp32", precision=FP32)
    bench.submit("runs", (1,), new=2)
    bench.submit("waits")
    bench.step()
    bench.flip(FP32)
    bench.run_all()
    assert bench.reused["waits"] == 12
    assert_right_answer(PROMPT, bench.tokens("waits"))


def test_a_preempted_request_does_not_reuse_what_it_wrote_in_another_mode() -> None:
    bench = Bench()
    bench.submit("a", new=8)
    bench.step(2)
    bench.flip(INT8)
    bench.scheduler.preempt()
    bench.run_all()
    assert bench.graphs[1, graph_key(INT8)].batches[-6].past_lens.tolist() == [0]
    assert_right_answer(PROMPT, bench.tokens("a"))


def test_a_prompt_whose_logits_are_not_finite_is_not_reused() -> None:
    """The prompt is the same up to the poison: its blocks may hold the values that are not finite."""
    bench = Bench()
    for graph in bench.graphs.values():
        graph.poison = 90
    bench.submit("sick", (*PROMPT[:12], 90))
    with capture_logs():
        bench.run_all()
    assert bench.outputs["sick"][-1].error is not None
    assert bench.run("well") == 0


def test_an_answer_whose_logits_turn_bad_is_reused_up_to_the_last_good_token() -> None:
    bench = Bench()
    answer = toy_answer(PROMPT, [(INT4, 1)] * 6)
    for graph in bench.graphs.values():
        graph.poison = answer[2]  # the sixteenth token: its block is full in the bad step
    bench.submit("sick", new=6)
    with capture_logs():
        bench.run_all()
    for graph in bench.graphs.values():
        graph.poison = None
    assert bench.run("well", (*PROMPT, *answer)) == 12


def test_what_a_failed_step_was_to_write_is_not_reused() -> None:
    bench = Bench()

    def explode(batch: StepBatch) -> None:
        raise MemoryError

    graph = bench.graphs[1, graph_key(INT4)]
    graph.on_run = explode
    bench.submit("a")
    with capture_logs():
        bench.run_all()
    graph.on_run = lambda batch: None
    assert bench.run("b") == 0


def test_a_prompt_that_was_cancelled_half_read_is_not_reused() -> None:
    bench = Bench(max_batch_tokens=12, max_sequences=1)
    bench.submit("a")
    bench.step()  # all but the last token: no logits have shown that what was written is sound
    bench.now(bench.loop.cancel("a"))
    assert bench.run("b") == 0


def test_under_a_full_pool_what_was_used_last_is_still_there() -> None:
    bench = Bench(num_blocks=9)
    others = [tuple(range(i, i + 13)) for i in (30, 50, 70)]
    bench.run("first")
    for i, other in enumerate(others):
        bench.run(f"other {i}", other)
        assert bench.run(f"again {i}") == 12
    assert bench.run("long ago", others[0]) == 0


# Keys


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_keys_are_equal_just_when_all_tokens_up_to_there_and_their_writer_are(
    data: st.DataObject,
) -> None:
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    labels = st.tuples(st.integers(1, 2), st.sampled_from([INT4, INT8]))
    one, other = data.draw(tokens), data.draw(tokens)
    label, other_label = data.draw(labels), data.draw(labels)
    keys, other_keys = BlockKeys(label, 2).before_last(one), BlockKeys(other_label, 2).before_last(other)
    assert len(keys) == (len(one) - 1) // 2
    for i, key in enumerate(keys):
        for j, other_key in enumerate(other_keys):
            is_same = label == other_label and one[: 2 * i + 2] == other[: 2 * j + 2]
            assert (key == other_key) == is_same


@given(tokens=st.lists(st.integers(0, 200_000), max_size=40), cut=st.integers(0, 40))
def test_keys_of_tokens_that_have_grown_are_those_of_all_at_once(tokens: list[int], cut: int) -> None:
    grown = BlockKeys((1, INT4), 4)
    grown.before_last(tokens[:cut])
    assert grown.before_last(tokens) == BlockKeys((1, INT4), 4).before_last(tokens)


# All at once


class PrefixMachine(RuleBasedStateMachine):
    """Requests that begin alike, cancels, flips, new generations and preemptions under a pool that is too small."""

    @initialize(num_blocks=st.integers(9, 20), budget=st.integers(4, 24))
    def make_loop(self, num_blocks: int, budget: int) -> None:
        self.bench = Bench(num_blocks, max_batch_tokens=budget, max_sequences=4)
        self.requests: dict[str, GenerationRequest] = {}
        self.resident: list[Label] = [(mode, 1) for mode in LADDER]
        self.active: Label = (INT4, 1)

    @property
    def open(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.bench.scheduler.sequences]

    @rule(
        beginning=st.sampled_from([(), PROMPT[:4], PROMPT, (*PROMPT, 1, 1, 1)]),
        rest=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        new=st.integers(1, 12),
        own=st.sampled_from([None, None, None, *LADDER]),
    )
    def submit(self, beginning: tuple[int, ...], rest: list[int], new: int, own: PrecisionMode | None) -> None:
        if (own or self.active[0], self.active[1]) in self.resident:
            name = f"r{len(self.requests)}"
            self.requests[name] = self.bench.submit(name, (*beginning, *rest), new, precision=own)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), new=st.integers(1, 8))
    def continue_an_answer(self, data: st.DataObject, new: int) -> None:
        before = data.draw(st.sampled_from(sorted(self.requests)))
        prompt = (*self.requests[before].prompt, *self.bench.ids(before))
        if len(prompt) + new <= 36:
            name = f"r{len(self.requests)}"
            self.requests[name] = self.bench.submit(name, prompt, new)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        assert self.bench.now(self.bench.loop.cancel(data.draw(st.sampled_from(self.open))))

    @precondition(lambda self: self.bench.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.bench.scheduler.preempt()

    @precondition(lambda self: len(self.resident) < 10)
    @rule(group=st.sampled_from(GRAPH_GROUPS))
    def install_a_generation(self, group: frozenset[PrecisionMode]) -> None:
        newest = max(generation for _, generation in self.resident) + 1
        self.bench.install(newest, group)
        self.resident += [(mode, newest) for mode in sorted(group, key=LADDER.index)]

    @rule(data=st.data(), in_flight=st.sampled_from(InFlight))
    def flip(self, data: st.DataObject, in_flight: InFlight) -> None:
        self.active = data.draw(st.sampled_from(self.resident))
        self.bench.flip(*self.active, in_flight)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.bench.step(count)

    @invariant()
    def the_cache_and_the_answers_are_right(self) -> None:
        self.bench.check()
        for name, request in self.requests.items():
            assert_right_answer(request.prompt, self.bench.tokens(name))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run_all()
        for name, request in self.requests.items():
            assert_right_answer(request.prompt, self.bench.tokens(name))
            if self.bench.outputs[name][-1].finish is FinishReason.LENGTH:
                assert len(self.bench.tokens(name)) == request.max_new_tokens
            else:
                assert self.bench.outputs[name][-1].finish is FinishReason.CANCELLED
        assert self.bench.scheduler.pool.num_free == self.bench.cache.num_blocks


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
