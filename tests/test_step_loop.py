"""The step loop on a toy model: no token is lost, repeated or wrongly labelled, whatever is asked for between steps."""

from __future__ import annotations

import random
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from fakes import FakeCache, FakeGraph, assert_right_answer, fake_graphs, toy_answer, toy_logits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from dskd.config import SchedulerConfig
from dskd.engine.request import (
    FinishReason,
    GenerationRequest,
    InFlight,
    MadeToken,
    NonFinite,
    Observation,
    SamplingParams,
    StepOutput,
)
from dskd.engine.step_loop import StepLoop
from dskd.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from dskquant.engines.protocol import GRAPH_GROUPS, StepBatch, graph_key
from dskquant.modes import LADDER, PrecisionMode

INT4, INT8, FP16, FP32 = LADDER
MIGRATE, FINISH = InFlight.MIGRATE, InFlight.FINISH
TIMEOUT = 60.0  # seconds; only ever reached by a loop that hangs
T = TypeVar("T")


class Bench:
    """A step loop over a toy model, with everything it delivered. Driven step by step unless it is started."""

    def __init__(self, num_blocks: int = 256, config: SchedulerConfig | None = None, install: bool = True) -> None:
        self.cache = FakeCache(num_blocks)
        self.outputs: dict[str, list[StepOutput]] = defaultdict(list)
        self.deliveries = 0
        self.gate: Callable[[], object] = lambda: None  # what each delivery waits for
        self.ended = threading.Condition()
        self.observed: list[Observation] = []
        self.loop = StepLoop(
            model="toy",
            engine_name="fake",
            cache=self.cache,
            config=config or SchedulerConfig(),
            mode=INT4,
            generation=1,
            deliver=self._deliver,
            observe=self.observed.extend,
        )
        self.graphs = fake_graphs(self.cache)
        if install:
            for graph in self.graphs.values():
                self.now(self.loop.install(1, graph))

    def _deliver(self, outputs: list[StepOutput]) -> None:
        self.deliveries += 1
        self.gate()
        with self.ended:
            for output in outputs:
                self.outputs[output.request_id].append(output)
            self.ended.notify_all()

    def graph_of(self, mode: PrecisionMode) -> FakeGraph:
        return self.graphs[graph_key(mode)]

    def now(self, future: Future[T]) -> T:
        """What was asked for, applied at once (for a loop that was not started)."""
        self.loop.apply_commands()
        return future.result(timeout=0)

    def submit(self, name: str, prompt: tuple[int, ...] = (1, 2, 3), new: int = 5, **options: Any) -> GenerationRequest:
        request = GenerationRequest(name, prompt, new, **options)
        self.now(self.loop.submit(request))
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.run_one_step()

    def run_all(self) -> None:
        while self.loop.snapshot().running + self.loop.snapshot().waiting:
            self.step()

    def tokens(self, name: str) -> list[MadeToken]:
        return [token for output in self.outputs[name] for token in output.tokens]

    def ids(self, name: str) -> list[int]:
        return [token.id for token in self.tokens(name)]

    def modes(self, name: str) -> list[PrecisionMode]:
        return [token.mode for token in self.tokens(name)]

    def last(self, name: str) -> StepOutput:
        assert self.outputs[name][-1].is_last
        assert not any(output.is_last for output in self.outputs[name][:-1])
        return self.outputs[name][-1]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits for deliveries of a started loop until `condition` holds."""
        with self.ended:
            assert self.ended.wait_for(condition, TIMEOUT)

    def has_ended(self, *names: str) -> bool:
        return all(self.outputs[name] and self.outputs[name][-1].is_last for name in names)

    def assert_pool_is_whole(self) -> None:
        snapshot = self.loop.snapshot()
        assert (snapshot.running, snapshot.waiting) == (0, 0)
        assert snapshot.blocks_free == snapshot.blocks_total == self.cache.num_blocks


@contextmanager
def started(bench: Bench) -> Iterator[StepLoop]:
    bench.loop.start()
    try:
        yield bench.loop
    finally:
        bench.loop.stop()
        assert not bench.loop.is_alive


# Answers


def test_an_answer_is_that_of_the_model_token_by_token_with_labels_and_times() -> None:
    bench = Bench()
    request = bench.submit("a", new=5)
    bench.run_all()
    assert bench.ids("a") == toy_answer(request.prompt, [(INT4, 1)] * 5)
    assert {(token.mode, token.generation, token.engine) for token in bench.tokens("a")} == {(INT4, 1, "fake")}
    assert bench.last("a").finish is FinishReason.LENGTH
    stats = bench.last("a").stats
    assert stats is not None
    assert 0 < stats.queue_s <= stats.first_token_s <= stats.total_s
    bench.assert_pool_is_whole()


def test_the_end_token_ends_the_answer_and_is_reported() -> None:
    bench = Bench()
    answer = toy_answer((1, 2, 3), [(INT4, 1)] * 3)
    bench.submit("a", new=50, end_token_ids=frozenset({answer[2]}))
    bench.run_all()
    assert bench.ids("a") == answer
    assert bench.last("a").finish is FinishReason.END_OF_TEXT


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    bench = Bench()
    bench.submit("a", prompt=(96, 1, 96), new=1, end_token_ids=frozenset({96}))
    bench.run_all()
    assert len(bench.ids("a")) == 1


def test_a_prompt_that_is_run_in_chunks_gives_the_same_answer_as_one_run_at_once() -> None:
    answers = []
    for budget in (512, 5):
        bench = Bench(config=SchedulerConfig(max_batch_tokens=budget, max_sequences=3))
        sampling = SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=4)
        bench.submit("greedy", tuple(range(50)), new=10)
        bench.submit("sampled", tuple(range(33)), new=10, sampling=sampling)
        bench.run_all()
        answers.append((bench.ids("greedy"), bench.ids("sampled")))
    assert answers[0] == answers[1]
    assert answers[0][0] == toy_answer(range(50), [(INT4, 1)] * 10)


def test_preemption_under_a_tiny_pool_gives_the_same_answers_as_a_big_pool() -> None:
    names = [f"r{i}" for i in range(6)]
    answers = []
    for num_blocks in (256, 9):
        bench = Bench(num_blocks=num_blocks)
        for i, name in enumerate(names):
            sampling = SamplingParams(temperature=0.9 * (i % 2), repetition_penalty=1.2, seed=i)
            bench.submit(name, prompt=tuple(range(i, i + 7)), new=25, sampling=sampling)
        bench.run_all()
        bench.assert_pool_is_whole()
        answers.append([bench.ids(name) for name in names])
    assert answers[0] == answers[1]
    assert sum(stats.preemptions for name in names if (stats := bench.last(name).stats)) > 0


def test_log_probabilities_come_with_the_tokens_that_asked_for_them() -> None:
    bench = Bench()
    bench.submit("a", new=1, top_logprobs=3)
    bench.submit("b", new=1)
    bench.run_all()
    (with_logprobs,), (without,) = bench.tokens("a"), bench.tokens("b")
    top_three = sorted(range(97), key=lambda token: -toy_logits((1, 2, 3), INT4, 1)[token])[:3]
    assert [token for token, _ in with_logprobs.top_logprobs] == top_three
    assert with_logprobs.logprob == with_logprobs.top_logprobs[0][1]
    assert (without.logprob, without.top_logprobs) == (None, ())


def test_all_outputs_of_a_step_are_delivered_in_one_call() -> None:
    bench = Bench()
    for name in "abc":
        bench.submit(name, new=4)
    bench.run_all()
    assert bench.deliveries == 4


# Batches


def test_int4_and_int8_share_a_run_in_which_the_rows_of_int8_alone_use_the_residual() -> None:
    bench = Bench()
    bench.submit("low", prompt=(1, 2), new=2)
    bench.submit("high", prompt=(3, 4, 5), new=2, precision=INT8)
    bench.run_all()
    prefill, decode = bench.graph_of(INT4).batches
    assert prefill.residual_rows.tolist() == [2, 3, 4]
    assert decode.residual_rows.tolist() == [1]
    assert (bench.modes("low"), bench.modes("high")) == ([INT4] * 2, [INT8] * 2)
    assert_right_answer((3, 4, 5), bench.tokens("high"))


def test_a_batch_lays_chunks_end_to_end_with_their_past_and_their_blocks() -> None:
    bench = Bench(config=SchedulerConfig(max_batch_tokens=8, max_sequences=4))
    bench.submit("old", prompt=(1, 2, 3, 4), new=3)  # block 0, then block 1 for the fifth token
    bench.step()
    bench.submit("new", prompt=tuple(range(10, 30)), new=3)  # blocks 1-5 once "old" has taken its second
    bench.step()
    batch = bench.graph_of(INT4).batches[-1]
    old_token = bench.ids("old")[0]
    assert batch.token_ids.tolist() == [old_token, 10, 11, 12, 13, 14, 15, 16]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4, 5, 6]
    assert batch.past_lens.tolist() == [4, 0]
    assert batch.subsequence_begins.tolist() == [0, 1, 8]
    assert batch.block_indices.tolist() == [0, 1, 2, 3]
    assert batch.block_indices_begins.tolist() == [0, 2, 4]
    assert batch.logit_rows.tolist() == [0]
    assert batch.max_context_len == 7
    assert {array.dtype.name for array in (batch.token_ids, batch.positions)} == {"int64"}
    int32s = (batch.past_lens, batch.subsequence_begins, batch.block_indices, batch.block_indices_begins)
    assert {array.dtype.name for array in (*int32s, batch.residual_rows, batch.logit_rows)} == {"int32"}


# Flips


def test_after_a_flip_the_next_token_is_made_by_the_new_mode_on_the_cache_of_the_old() -> None:
    bench = Bench()
    bench.submit("a", new=6)
    for mode in (INT4, FP32, INT8, FP16, FP32, INT4):
        bench.now(bench.loop.flip(mode, 1, MIGRATE))
        bench.step()
    assert bench.modes("a") == [INT4, FP32, INT8, FP16, FP32, INT4]
    assert_right_answer((1, 2, 3), bench.tokens("a"))
    first_in_fp32 = bench.graph_of(FP32).batches[0]
    assert (first_in_fp32.past_lens.tolist(), len(first_in_fp32.token_ids)) == ([3], 1)


def test_a_flip_says_what_it_did() -> None:
    bench = Bench()
    bench.submit("a")
    bench.submit("own", precision=INT8)
    report = bench.now(bench.loop.flip(FP16, 1, MIGRATE))
    assert (report.from_mode, report.to_mode, report.generation, report.migrated) == (INT4, FP16, 1, 1)
    assert report.microseconds > 0


def test_under_finish_open_requests_end_on_the_old_mode_whether_they_run_or_wait() -> None:
    bench = Bench(config=SchedulerConfig(max_sequences=1))
    bench.submit("running", new=3)
    bench.step()
    bench.submit("waiting", new=3)
    assert bench.now(bench.loop.flip(FP32, 1, FINISH)).migrated == 0
    bench.submit("later", new=3)
    bench.run_all()
    assert [set(bench.modes(name)) for name in ("running", "waiting", "later")] == [{INT4}, {INT4}, {FP32}]


def test_a_request_with_a_precision_of_its_own_keeps_it_and_moves_to_the_new_generation() -> None:
    bench = Bench()
    for graph in fake_graphs(bench.cache, generation=2).values():
        bench.now(bench.loop.install(2, graph))
    bench.submit("own", new=4, precision=INT8)
    bench.step()
    bench.now(bench.loop.flip(FP16, 2, FINISH))
    bench.step()
    bench.now(bench.loop.flip(FP16, 2, MIGRATE))
    bench.run_all()
    assert [(token.mode, token.generation) for token in bench.tokens("own")] == [(INT8, 1)] * 2 + [(INT8, 2)] * 2
    assert_right_answer((1, 2, 3), bench.tokens("own"))


def test_a_mode_that_the_new_generation_lacks_goes_on_in_the_old_generation() -> None:
    bench = Bench()
    int_graph = FakeGraph({INT4, INT8}, generation=2)
    int_graph.bind(bench.cache)
    bench.now(bench.loop.install(2, int_graph))
    bench.submit("own", new=3, precision=FP32)
    bench.now(bench.loop.flip(INT4, 2, MIGRATE))
    bench.run_all()
    assert {(token.mode, token.generation) for token in bench.tokens("own")} == {(FP32, 1)}


def test_a_flip_to_a_mode_without_a_graph_is_refused_and_changes_nothing() -> None:
    bench = Bench()
    with pytest.raises(FailedPreconditionError, match="fp32 is not resident in generation 2"):
        bench.now(bench.loop.flip(FP32, 2, MIGRATE))
    assert (bench.loop.snapshot().mode, bench.loop.snapshot().generation) == (INT4, 1)


def test_a_flip_with_64_open_requests_takes_at_most_100_microseconds() -> None:
    bench = Bench(num_blocks=512)
    for i in range(64):
        bench.submit(f"r{i}")
    bench.step()
    flips = [bench.now(bench.loop.flip(mode, 1, MIGRATE)) for mode in LADDER * 10]
    assert min(flip.microseconds for flip in flips) <= 100


# Graphs come and go


def test_a_request_for_a_mode_without_a_graph_is_refused() -> None:
    bench = Bench(install=False)
    bench.now(bench.loop.install(1, bench.graph_of(INT4)))
    with pytest.raises(FailedPreconditionError, match="fp32 is not resident") as refusal:
        bench.submit("a", precision=FP32)
    assert refusal.value.subject == "fp32"


def test_a_mode_is_not_installed_twice_in_one_generation() -> None:
    bench = Bench()
    with pytest.raises(FailedPreconditionError, match="fp32 of generation 1 is already installed"):
        bench.now(bench.loop.install(1, FakeGraph({FP32})))


def test_a_graph_is_retired_only_when_no_open_request_uses_it() -> None:
    bench = Bench()
    bench.submit("a", new=3, precision=FP32)
    bench.step()
    assert not bench.now(bench.loop.retire(1, frozenset({FP32})))
    bench.run_all()
    assert bench.modes("a") == [FP32] * 3
    assert bench.now(bench.loop.retire(1, frozenset({FP32})))
    with pytest.raises(FailedPreconditionError, match="not resident"):
        bench.submit("late", precision=FP32)
    with pytest.raises(FailedPreconditionError, match="not resident"):
        bench.now(bench.loop.flip(FP32, 1, MIGRATE))
    graph = weakref.ref(bench.graphs.pop(frozenset({FP32})))
    assert graph() is None


def test_a_graph_can_be_retired_when_its_last_request_has_migrated_away() -> None:
    bench = Bench()
    bench.now(bench.loop.flip(FP16, 1, MIGRATE))
    bench.submit("a", new=3)
    bench.now(bench.loop.flip(INT4, 1, FINISH))
    assert not bench.now(bench.loop.retire(1, frozenset({FP16})))
    bench.now(bench.loop.flip(INT8, 1, MIGRATE))
    assert bench.now(bench.loop.retire(1, frozenset({FP16})))


def test_while_suspended_nothing_runs_and_then_requests_go_on_with_the_graph_that_came() -> None:
    bench = Bench()
    first = bench.submit("a", new=4)
    bench.step()
    bench.now(bench.loop.suspend(1, frozenset({INT4, INT8})))
    second = bench.submit("b", new=2)
    bench.step()
    assert len(bench.ids("a")) == 1
    successor = FakeGraph({INT4, INT8}, 2)
    successor.bind(bench.cache)
    bench.now(bench.loop.install(2, successor))
    bench.now(bench.loop.flip(INT4, 2, MIGRATE))
    bench.now(bench.loop.resume())
    bench.run_all()
    assert [token.generation for token in bench.tokens("a")] == [1, 2, 2, 2]
    for request in (first, second):
        assert_right_answer(request.prompt, bench.tokens(request.request_id))


def test_requests_whose_graph_does_not_come_back_are_ended_and_others_go_on() -> None:
    bench = Bench()
    bench.submit("lost", new=4)
    bench.submit("kept", new=4, precision=FP32)
    bench.step()
    bench.now(bench.loop.suspend(1, frozenset({INT4, INT8})))
    bench.now(bench.loop.resume())
    bench.run_all()
    assert isinstance(bench.last("lost").error, UnavailableError)
    assert bench.modes("kept") == [FP32] * 4
    bench.assert_pool_is_whole()


@pytest.mark.parametrize(("generation", "mode", "reason"), [(1, INT4, "is active"), (7, FP32, "not resident")])
def test_a_graph_that_is_active_or_not_there_cannot_be_retired(
    generation: int, mode: PrecisionMode, reason: str
) -> None:
    bench = Bench()
    with pytest.raises(FailedPreconditionError, match=reason):
        bench.now(bench.loop.retire(generation, frozenset({mode})))


# Refusals


def test_a_request_that_never_fits_into_the_cache_is_refused() -> None:
    bench = Bench(num_blocks=4)
    with pytest.raises(ResourceExhaustedError):
        bench.submit("a", prompt=tuple(range(10)), new=10)
    assert bench.loop.snapshot().waiting == 0


def test_an_id_that_is_open_is_refused_and_free_again_after_the_end() -> None:
    bench = Bench()
    bench.submit("a")
    with pytest.raises(InvalidArgumentError, match="'a' is open already"):
        bench.submit("a")
    bench.run_all()
    bench.submit("a")


# Failures


def test_a_graph_that_raises_fails_its_own_batch_and_the_others_go_on() -> None:
    bench = Bench()

    def explode(batch: StepBatch) -> None:
        raise RuntimeError("engine broke")

    bench.submit("low", new=4)
    bench.submit("high", new=4, precision=INT8)
    bench.submit("exact", new=4, precision=FP32)
    bench.step()
    bench.graph_of(INT4).on_run = explode
    with capture_logs() as logs:
        bench.run_all()
    for name in ("low", "high"):
        assert isinstance(bench.last(name).error, InternalError)
        assert len(bench.tokens(name)) == 1
    assert bench.last("exact").finish is FinishReason.LENGTH
    assert_right_answer((1, 2, 3), bench.tokens("exact"))
    bench.assert_pool_is_whole()
    (entry,) = logs
    assert (entry["event"], entry["model"], entry["generations"]) == ("step failed", "toy", [1])
    assert entry["requests"] == ["low", "high"]
    assert entry["exc_info"]


def test_a_graph_that_raised_once_serves_the_next_request() -> None:
    bench = Bench()
    graph = bench.graph_of(INT4)

    def explode_once(batch: StepBatch) -> None:
        graph.on_run = lambda batch: None
        raise MemoryError

    graph.on_run = explode_once
    bench.submit("a")
    with capture_logs():
        bench.run_all()
    bench.submit("b")
    bench.run_all()
    assert_right_answer((1, 2, 3), bench.tokens("b"))
    assert bench.last("b").finish is FinishReason.LENGTH


def test_logits_that_are_not_finite_are_made_again_by_the_most_exact_mode_in_memory() -> None:
    """The whole context is read again: the cache may hold what is not finite, too. A precision of its own gives way."""
    bench = Bench()
    bench.graph_of(INT4).poison = 90
    bench.submit("sick", prompt=(5, 90), new=3)
    bench.submit("own", prompt=(6, 90), new=3, precision=INT8)
    bench.submit("well", prompt=(5, 6), new=3)
    with capture_logs() as logs:
        bench.run_all()
    assert bench.modes("sick") == bench.modes("own") == [FP32] * 3
    assert bench.modes("well") == [INT4] * 3
    for name, prompt in (("sick", (5, 90)), ("own", (6, 90)), ("well", (5, 6))):
        assert_right_answer(prompt, bench.tokens(name))
    assert {(entry["event"], entry["redone_in"]) for entry in logs} == {("non-finite logits", "fp32")}
    assert {(seen.mode, seen.redone_in) for seen in bench.observed if isinstance(seen, NonFinite)} == {
        (INT4, FP32),
        (INT8, FP32),
    }
    bench.assert_pool_is_whole()


def test_logits_that_no_mode_makes_finite_end_that_request_alone() -> None:
    bench = Bench()
    for mode in LADDER:
        bench.graph_of(mode).poison = 90
    bench.submit("sick", prompt=(5, 90))
    bench.submit("well", prompt=(5, 6))
    with capture_logs() as logs:
        bench.run_all()
    error = bench.last("sick").error
    assert isinstance(error, InternalError)
    assert str(error) == "mode fp32 produced non-finite logits"
    assert bench.tokens("sick") == []
    assert [entry["event"] for entry in logs] == ["non-finite logits"] * 2
    assert_right_answer((5, 6), bench.tokens("well"))


def test_a_listener_that_raises_does_not_end_the_loop() -> None:
    bench = Bench()
    bench.submit("a", new=2)
    bench.gate = lambda: 1 / 0
    with capture_logs() as logs:
        bench.step()
    bench.gate = lambda: None
    bench.step()
    assert [entry["event"] for entry in logs] == ["outputs were not delivered"]
    assert bench.last("a").finish is FinishReason.LENGTH


def test_a_damaged_pool_ends_the_loop_and_tells_every_request() -> None:
    bench = Bench()
    graph = bench.graph_of(INT4)
    bench.submit("a", new=100)

    def lose_all_free_blocks(batch: StepBatch) -> None:
        bench.loop._core._scheduler.pool._free.clear()

    graph.on_run = lose_all_free_blocks
    with capture_logs() as logs:
        bench.loop.start()
        bench.loop.join(TIMEOUT)
    assert not bench.loop.is_alive
    assert [entry["event"] for entry in logs] == ["step loop ended by a bug"]
    assert isinstance(bench.last("a").error, InternalError)
    with pytest.raises(InternalError, match="ended by a bug"):
        bench.loop.cancel("a").result(timeout=0)


# Cancelling


def test_a_cancelled_request_ends_with_a_last_output_and_gives_its_blocks_back() -> None:
    bench = Bench(config=SchedulerConfig(max_sequences=1))
    bench.submit("running")
    bench.submit("waiting")
    bench.step(2)
    assert bench.now(bench.loop.cancel("running"))
    assert bench.now(bench.loop.cancel("waiting"))
    for name, made in (("running", 2), ("waiting", 0)):
        assert bench.last(name).finish is FinishReason.CANCELLED
        assert bench.last(name).stats is not None
        assert len(bench.tokens(name)) == made
    bench.assert_pool_is_whole()


def test_cancelling_what_is_not_open_says_so() -> None:
    bench = Bench()
    assert bench.now(bench.loop.cancel("nobody")) is False


def test_a_request_whose_submission_was_cancelled_in_time_is_never_opened() -> None:
    bench = Bench()
    assert bench.loop.submit(GenerationRequest("a", (1,), 1)).cancel()
    bench.loop.apply_commands()
    assert bench.loop.snapshot().waiting == 0


# The end


def test_draining_refuses_new_requests_and_is_done_when_the_open_ones_are() -> None:
    bench = Bench()
    bench.submit("a", new=2)
    drained = bench.loop.drain(grace_s=TIMEOUT)
    bench.loop.apply_commands()
    with pytest.raises(UnavailableError):
        bench.submit("late")
    bench.step()
    assert not drained.done()
    bench.step()
    assert drained.result(timeout=0) == 0
    assert bench.last("a").finish is FinishReason.LENGTH
    with pytest.raises(UnavailableError):
        bench.submit("later still")


def test_what_is_open_after_the_grace_period_is_ended_and_counted() -> None:
    bench = Bench()
    bench.submit("a")
    bench.submit("b")
    bench.step()
    assert bench.now(bench.loop.drain(grace_s=0.0)) == 2
    assert isinstance(bench.last("a").error, UnavailableError)
    bench.assert_pool_is_whole()


def test_stopping_ends_what_is_left_and_refuses_what_comes_after() -> None:
    bench = Bench(num_blocks=1_024)
    with started(bench) as loop:
        loop.submit(GenerationRequest("a", (1,), 4_000)).result(TIMEOUT)
        bench.wait_for(lambda: len(bench.outputs["a"]) > 3)
        drained, retired = loop.drain(TIMEOUT), loop.retire(1, frozenset({FP32}))
    assert isinstance(bench.last("a").error, UnavailableError)
    assert drained.result(timeout=0) == 1
    assert retired.result(timeout=0)
    with pytest.raises(UnavailableError):
        loop.submit(GenerationRequest("b", (1,), 1)).result(timeout=0)


def test_a_loop_that_was_never_started_stops_too() -> None:
    bench = Bench()
    bench.submit("a")
    bench.loop.stop()
    assert isinstance(bench.last("a").error, UnavailableError)


# All at once


def test_eight_streams_over_200_flips_lose_and_repeat_no_token_and_carry_the_right_labels() -> None:
    """Random flips over the four modes, one before each step: the active one makes each token and is its label."""
    rng = random.Random(1)
    bench = Bench(num_blocks=8 * 60)
    prompts = {f"s{i}": tuple(rng.randrange(97) for _ in range(rng.randrange(1, 30))) for i in range(8)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, new=200)
    active = []
    for _ in range(200):
        active.append(rng.choice(LADDER))
        bench.now(bench.loop.flip(active[-1], 1, MIGRATE))
        bench.step()
    for name, prompt in prompts.items():
        assert bench.modes(name) == active
        assert bench.ids(name) == toy_answer(prompt, [(mode, 1) for mode in active])
        assert bench.last(name).finish is FinishReason.LENGTH
    assert bench.loop.snapshot().tokens_by_mode == {mode: 8 * active.count(mode) for mode in LADDER}
    bench.assert_pool_is_whole()


def test_eight_streams_and_200_flips_from_another_thread() -> None:
    rng = random.Random(2)
    bench = Bench(num_blocks=8 * 110)
    names = [f"s{i}" for i in range(8)]
    flips = threading.Semaphore(0)
    bench.gate = lambda: flips.acquire(timeout=TIMEOUT)  # at most one step for each flip: the streams outlast them all
    with started(bench) as loop:
        for i, name in enumerate(names):
            own = INT8 if i == 7 else None
            loop.submit(GenerationRequest(name, (i, 1, 2), 400, precision=own))
        for _ in range(200):
            flips.release()
            loop.flip(rng.choice(LADDER), 1, MIGRATE).result(TIMEOUT)
        flips.release(100_000)
        bench.wait_for(lambda: bench.has_ended(*names))
    for i, name in enumerate(names):
        assert len(bench.tokens(name)) == 400
        assert set(bench.modes(name)) == ({INT8} if i == 7 else set(LADDER))
        assert_right_answer((i, 1, 2), bench.tokens(name))
    bench.assert_pool_is_whole()


def test_a_thousand_requests_cancelled_at_random_points_leave_the_pool_whole() -> None:
    rng = random.Random(3)
    bench = Bench(num_blocks=60, config=SchedulerConfig(max_batch_tokens=64, max_sequences=16, max_waiting=1_000))
    names = [f"r{i}" for i in range(1_000)]
    with started(bench) as loop:
        futures = []
        for i, name in enumerate(names):
            prompt = tuple(range(rng.randrange(1, 40)))
            futures.append(loop.submit(GenerationRequest(name, prompt, rng.randrange(1, 40))))
            loop.cancel(names[rng.randrange(i + 1)])
        for future in futures:
            future.result(TIMEOUT)
        for name in rng.sample(names, len(names)):
            loop.cancel(name)
        bench.wait_for(lambda: bench.has_ended(*names))
        assert loop.drain(TIMEOUT).result(TIMEOUT) == 0
        assert loop.is_alive
        bench.assert_pool_is_whole()
    finished = {reason: [n for n in names if bench.last(n).finish is reason] for reason in FinishReason}
    assert len(finished[FinishReason.CANCELLED]) + len(finished[FinishReason.LENGTH]) == 1_000
    assert len(finished[FinishReason.CANCELLED]) > 100


def test_an_idle_loop_wakes_up_for_each_request() -> None:
    bench = Bench()
    with started(bench) as loop:
        for i in range(50):
            loop.submit(GenerationRequest(f"r{i}", (1, i), 2))
            bench.wait_for(lambda i=i: bench.has_ended(f"r{i}"))  # type: ignore[misc]
            assert_right_answer((1, i), bench.tokens(f"r{i}"))


class LoopMachine(RuleBasedStateMachine):
    """Requests, cancels, flips, new generations and retirements in any order, under a pool that is too small.

    The model of it: what each open request, and the next one, must be labelled with.
    """

    @initialize()
    def make_loop(self) -> None:
        self.bench = Bench(num_blocks=12, config=SchedulerConfig(max_batch_tokens=16, max_sequences=4))
        self.active = (INT4, 1)
        self.resident = {(mode, 1) for mode in LADDER}
        self.newest = 1
        self.requests: dict[str, GenerationRequest] = {}
        self.labels: dict[str, tuple[PrecisionMode, int]] = {}  # of those that may be open
        self.seen: dict[str, int] = defaultdict(int)

    @rule(
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=24),
        new=st.integers(1, 20),
        own=st.sampled_from([None, None, *LADDER]),
        end=st.integers(0, 96),
    )
    def submit(self, prompt: list[int], new: int, own: PrecisionMode | None, end: int) -> None:
        name = f"r{len(self.requests)}"
        label = (own or self.active[0], self.active[1])
        options = {"precision": own, "end_token_ids": frozenset({end})}
        if label not in self.resident:
            with pytest.raises(FailedPreconditionError):
                self.bench.submit(name, tuple(prompt), new, **options)
            return
        self.requests[name] = self.bench.submit(name, tuple(prompt), new, **options)
        self.labels[name] = label

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.labels)))
        assert self.bench.now(self.bench.loop.cancel(name))
        assert self.bench.last(name).finish is FinishReason.CANCELLED
        del self.labels[name]

    @rule(group=st.sampled_from(GRAPH_GROUPS))
    def install_a_generation(self, group: frozenset[PrecisionMode]) -> None:
        self.newest += 1
        graph = FakeGraph(group, self.newest)
        graph.bind(self.bench.cache)
        self.bench.now(self.bench.loop.install(self.newest, graph))
        self.resident |= {(mode, self.newest) for mode in group}

    @rule(data=st.data(), in_flight=st.sampled_from(InFlight))
    def flip(self, data: st.DataObject, in_flight: InFlight) -> None:
        by_age = sorted(self.resident, key=lambda label: (label[1], LADDER.index(label[0])))
        self.active = data.draw(st.sampled_from(by_age))
        self.bench.now(self.bench.loop.flip(*self.active, in_flight))
        if in_flight is MIGRATE:
            for name in self.labels:
                own = self.requests[name].precision
                moved = (own or self.active[0], self.active[1])
                self.labels[name] = moved if moved in self.resident else self.labels[name]

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        mode, generation = data.draw(st.sampled_from(sorted(self.resident, key=str)))
        retired = self.bench.loop.retire(generation, frozenset({mode}))
        self.bench.loop.apply_commands()
        if (mode, generation) == self.active:
            assert isinstance(retired.exception(timeout=0), FailedPreconditionError)
            return
        is_used = (mode, generation) in self.labels.values()
        assert retired.result(timeout=0) is not is_used
        if not is_used:
            self.resident.remove((mode, generation))

    @rule()
    def step(self) -> None:
        self.bench.step()
        for name in list(self.labels):
            fresh = self.bench.tokens(name)[self.seen[name] :]
            assert [(token.mode, token.generation) for token in fresh] == [self.labels[name]] * len(fresh)
            self.seen[name] += len(fresh)
            if self.bench.has_ended(name):
                del self.labels[name]

    @invariant()
    def blocks_and_answers_are_right(self) -> None:
        self.bench.loop._core.check()
        for name, request in self.requests.items():
            assert_right_answer(request.prompt, self.bench.tokens(name))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run_all()
        self.bench.assert_pool_is_whole()
        for name, request in self.requests.items():
            last = self.bench.last(name)
            made = self.bench.ids(name)
            assert_right_answer(request.prompt, self.bench.tokens(name))
            if last.finish is FinishReason.LENGTH:
                assert len(made) == request.max_new_tokens
            elif last.finish is FinishReason.END_OF_TEXT:
                assert made[-1] in request.end_token_ids


TestLoopMachine = LoopMachine.TestCase
TestLoopMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
