"""Which requests to a plain graph share a batch, and that each gets its own answer: no thread, no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dskd.config import BatchingConfig
from dskd.engine.request import InFlight, ModeRules, NonFinite, Observation, ScoringPlan
from dskd.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from dskd.plain.batch_core import BatchCore, Outcome
from dskd.plain.request import TensorAnswer, TensorRequest, UncomputableError
from dskd.plain.served_graph import ServedGraph
from dskd.plain.waiting import ALONE, Waiting, WaitingLine, shapes_of
from dskquant.errors import EngineError
from dskquant.modes import PrecisionMode
from dskquant.plain.protocol import Tensors, TensorSpec

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
FACTORS = {INT4: 1.9, INT8: 1.99, FP32: 2.0}
FLOAT32 = np.dtype(np.float32)


class Scale:
    """y = factor * x; fails where x is negative, and is not finite above 1000 unless it is the reference."""

    inputs = outputs = (TensorSpec("x", FLOAT32, (None, None)),)

    def __init__(self, mode: PrecisionMode, ran: list[tuple[PrecisionMode, int]]) -> None:
        self._mode = mode
        self._ran = ran

    def run(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        x = tensors["x"]
        if (x < 0).any():
            raise EngineError("negative")
        self._ran.append((self._mode, len(x)))
        y = x * np.float32(FACTORS[self._mode])
        return {"x": np.where((x > 1000) & (self._mode is not FP32), np.nan, y)}


def entry(
    rows: int = 1, width: int = 2, precision: PrecisionMode | None = None, arrived: float = 0.0, value: float = 1.0
) -> Waiting:
    x = np.full((rows, width), value, np.float32)
    request = TensorRequest("r", {"x": x}, precision)
    return Waiting(request, None, arrived, rows, shapes_of(request), 1)


class Bench:
    """A core with a graph for each mode in generation 1, and all that it told."""

    def __init__(self, limits: BatchingConfig = ALONE, max_waiting: int = 100) -> None:
        self.outcomes: list[Outcome] = []
        self.observed: list[Observation] = []
        self.ran: list[tuple[PrecisionMode, int]] = []
        self.core = BatchCore("m", limits, max_waiting, INT8, 1, self.outcomes.extend, self.observed.extend)
        for mode in FACTORS:
            self.install(1, mode)

    def install(self, generation: int, mode: PrecisionMode) -> None:
        self.core.install(generation, ServedGraph(Scale(mode, self.ran), mode, "fake", 1))

    def submit(self, *entries: Waiting) -> None:
        for one in entries:
            self.core.submit(one)

    def run(self) -> None:
        while self.core.run_batch():
            pass
        self.core.settle()

    def answer(self, waiting: Waiting) -> TensorAnswer:
        (answer,) = (outcome for found, outcome in self.outcomes if found is waiting)
        assert isinstance(answer, TensorAnswer)
        return answer

    def failure(self, waiting: Waiting) -> Exception:
        (failure,) = (outcome for found, outcome in self.outcomes if found is waiting)
        assert isinstance(failure, Exception)
        return failure


def rows_of(batches: Sequence[Sequence[Waiting]]) -> list[int]:
    return [sum(one.rows for one in batch) for batch in batches]


def taken(line: WaitingLine, now: float) -> list[list[Waiting]]:
    """The batches that are due."""
    batches = []
    while batch := line.take(now, lambda one: (1, one.request.precision or INT8)):
        batches.append(batch)
    return batches


def test_a_request_waits_for_others_no_longer_than_the_delay() -> None:
    line = WaitingLine(BatchingConfig(max_size=4, max_delay_ms=10))
    first, second = entry(arrived=5.0), entry(arrived=5.006)
    line.add(first)
    line.add(second)
    assert taken(line, 5.009) == []
    assert line.patience(5.009) == pytest.approx(0.001)
    assert taken(line, 5.0101) == [[first, second]]
    assert (len(line), line.patience(9.0)) == (0, math.inf)


def test_a_full_batch_waits_for_nothing() -> None:
    line = WaitingLine(BatchingConfig(max_size=4, max_delay_ms=10))
    for rows in (1, 2, 2, 1, 1, 1):
        line.add(entry(rows))
    assert rows_of(taken(line, 0.0)) == [3, 4]  # one of two rows did not fit into the first; the last one waits
    assert len(line) == 1


def test_a_batch_of_a_preferred_size_waits_for_nothing() -> None:
    line = WaitingLine(BatchingConfig(max_size=8, max_delay_ms=10, preferred_sizes=(2, 4)))
    for _ in range(5):
        line.add(entry())
    assert rows_of(taken(line, 0.0)) == [4]
    line.add(entry())
    assert rows_of(taken(line, 0.0)) == [2]


def test_a_request_with_more_rows_than_a_batch_may_have_is_a_batch_of_its_own() -> None:
    line = WaitingLine(BatchingConfig(max_size=4))
    line.add(entry(9))
    line.add(entry(1))
    assert rows_of(taken(line, 0.0)) == [9, 1]


def test_without_batching_each_request_runs_alone_and_at_once() -> None:
    line = WaitingLine(ALONE)
    line.add(entry())
    line.add(entry())
    assert rows_of(taken(line, 0.0)) == [1, 1]


def test_modes_and_shapes_never_share_a_batch_and_hold_up_no_full_one() -> None:
    line = WaitingLine(BatchingConfig(max_size=2, max_delay_ms=10))
    early, other, wide = entry(), entry(precision=FP32), entry(width=3)
    for one in (early, other, wide, entry(precision=FP32), entry(width=3)):
        line.add(one)
    assert [[one.request.precision for one in batch] for batch in taken(line, 0.0)] == [[FP32, FP32], [None, None]]
    assert list(line) == [early]


def test_what_was_taken_out_of_the_line_is_in_no_batch() -> None:
    line = WaitingLine(BatchingConfig(max_size=4))
    gone, stays = entry(), entry()
    line.add(gone)
    line.add(stays)
    assert (line.remove(gone), line.remove(gone)) == (True, False)
    assert taken(line, 0.0) == [[stays]]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 2]), st.sampled_from([None, INT4, FP32]))),
    max_size=st.integers(1, 8),
    flips=st.lists(st.tuples(st.sampled_from(list(FACTORS)), st.sampled_from(list(InFlight))), max_size=3),
)
def test_everybody_gets_the_answer_to_his_own_request_from_the_graph_it_names(
    sizes: list[tuple[int, int, PrecisionMode | None]],
    max_size: int,
    flips: list[tuple[PrecisionMode, InFlight]],
) -> None:
    bench = Bench(BatchingConfig(max_size=max_size))
    entries = [entry(rows, width, mode, value=number + 1) for number, (rows, width, mode) in enumerate(sizes)]
    bench.submit(*entries)
    for mode, in_flight in flips:
        bench.core.run_batch()
        bench.core.flip(mode, 1, in_flight)
    bench.run()
    assert len(bench.outcomes) == len(entries)
    for one in entries:
        answer = bench.answer(one)
        assert one.request.precision in (None, answer.mode)
        np.testing.assert_array_equal(answer.tensors["x"], one.request.tensors["x"] * np.float32(FACTORS[answer.mode]))
        assert answer.batch_rows <= max(max_size, one.rows)


def test_a_flip_takes_waiting_requests_along_or_leaves_them_where_they_are() -> None:
    bench = Bench()
    moved, own = entry(), entry(precision=INT4)
    bench.submit(moved, own)
    assert bench.core.flip(FP32, 1, InFlight.MIGRATE).migrated == 1
    finished = entry()
    bench.submit(finished)
    assert bench.core.flip(INT8, 1, InFlight.FINISH).migrated == 0
    after = entry()
    bench.submit(after)
    bench.run()
    assert [bench.answer(one).mode for one in (moved, own, finished, after)] == [FP32, INT4, FP32, INT8]


def test_a_request_in_a_mode_of_its_own_uses_the_graph_of_the_newest_generation_that_has_one() -> None:
    bench = Bench()
    lost, found = entry(precision=INT4), entry(precision=FP32)
    bench.submit(lost, found)
    bench.install(2, INT8)
    bench.install(2, FP32)
    bench.core.flip(INT8, 2, InFlight.MIGRATE)
    assert not bench.core.retire(1, {INT4})
    bench.run()
    assert [bench.answer(one).generation for one in (lost, found)] == [1, 2]
    assert bench.core.retire(1, {INT4})


def test_a_flip_on_the_way_takes_no_mode_from_a_request_that_was_promised_it() -> None:
    bench, promised = Bench(), entry(precision=INT4)
    bench.install(2, INT8)
    bench.core.flip(INT8, 2, InFlight.MIGRATE)
    bench.submit(promised)
    assert not bench.core.retire(1, {INT4})
    bench.run()
    assert (bench.answer(promised).mode, bench.answer(promised).generation) == (INT4, 1)


def test_graphs_in_use_are_not_retired() -> None:
    bench = Bench()
    with pytest.raises(FailedPreconditionError, match="int8 is active"):
        bench.core.retire(1, {INT8})
    with pytest.raises(FailedPreconditionError, match="fp16 of generation 1 is not in memory"):
        bench.core.retire(1, {PrecisionMode.FP16})
    with pytest.raises(FailedPreconditionError, match="int4 of generation 2 is not in memory"):
        bench.core.flip(INT4, 2, InFlight.MIGRATE)
    assert bench.core.retire(1, {INT4})
    with pytest.raises(FailedPreconditionError, match="int8 has a graph in 1 already"):
        bench.install(1, INT8)


def test_the_rules_of_the_monitor_choose_the_mode_of_those_who_asked_for_none() -> None:
    bench = Bench()
    bench.core.set_rules(ModeRules(fallback=FP32))
    follows, own = entry(), entry(precision=INT4)
    bench.submit(follows, own)
    bench.run()
    assert [bench.answer(one).mode for one in (follows, own)] == [FP32, INT4]


def test_what_an_engine_cannot_compute_fails_alone() -> None:
    bench = Bench(BatchingConfig(max_size=8))
    good, bad, other = entry(value=1), entry(value=-1), entry(value=2)
    bench.submit(good, bad, other)
    bench.run()
    assert isinstance(bench.failure(bad), UncomputableError)
    assert bench.answer(good).tensors["x"][0, 0] == np.float32(1.99)
    assert bench.answer(other).tensors["x"][0, 0] == 2 * np.float32(1.99)


def test_what_is_not_finite_is_done_again_by_the_reference_and_told() -> None:
    bench = Bench(BatchingConfig(max_size=8))
    loud, beside = entry(value=2000), entry(value=1)
    bench.submit(loud, beside)
    bench.run()
    assert {bench.answer(one).mode for one in (loud, beside)} == {FP32}
    assert bench.answer(loud).tensors["x"][0, 0] == 4000
    (told,) = bench.observed
    assert isinstance(told, NonFinite)
    assert (told.mode, told.redone_in) == (INT8, FP32)


def test_a_suspended_model_holds_requests_until_its_graphs_are_back() -> None:
    bench = Bench()
    lost, kept = entry(precision=INT4), entry()
    bench.submit(lost, kept)
    bench.core.suspend(1, {INT4, INT8})
    bench.run()
    assert bench.outcomes == []
    bench.install(1, INT8)
    bench.core.resume()
    bench.run()
    assert bench.answer(kept).mode is INT8
    assert isinstance(bench.failure(lost), UnavailableError)


def test_too_many_that_wait_are_refused() -> None:
    bench = Bench(max_waiting=2)
    refused = entry()
    bench.submit(entry(), entry(), refused)
    assert isinstance(bench.failure(refused), ResourceExhaustedError)
    bench.run()
    assert len(bench.outcomes) == 3


def test_a_drain_ends_with_the_last_request_or_its_grace() -> None:
    for grace_s, aborted in ((100.0, 0), (0.0, 2)):
        bench, done = Bench(BatchingConfig(max_size=8, max_delay_ms=50_000)), Future[int]()
        left = [entry(arrived=math.inf if aborted else -math.inf), entry()]
        bench.submit(*left)
        bench.core.drain(grace_s, done)
        late = entry()
        bench.submit(late)
        assert isinstance(bench.failure(late), UnavailableError)
        bench.run()
        assert done.result(0) == aborted
        assert isinstance(bench.outcomes[-1][1], UnavailableError if aborted else TensorAnswer)


def test_samples_are_run_again_on_the_reference() -> None:
    bench = Bench()
    bench.core.set_scoring(ScoringPlan(FP32, share=1.0, time_share=1.0))
    bench.submit(entry(), entry(precision=FP32))
    bench.run()
    assert bench.core.patience() < math.inf
    bench.core.score()
    (score,) = bench.observed
    assert (score.mode, score.reference, score.is_probe) == (INT8, FP32, False)  # type: ignore[union-attr]
    assert score.kl == pytest.approx(0.005**2, rel=1e-3)  # type: ignore[union-attr]


def test_a_probe_is_scored_in_the_shadow_of_the_reference() -> None:
    bench = Bench()
    bench.core.set_scoring(ScoringPlan(FP32, share=1.0, time_share=1.0, probe=INT4))
    bench.submit(entry(precision=FP32))
    bench.run()
    bench.core.score()
    (score,) = bench.observed
    assert (score.mode, score.is_probe) == (INT4, True)  # type: ignore[union-attr]
    assert score.kl == pytest.approx(0.05**2, rel=1e-3)  # type: ignore[union-attr]


def test_while_a_graph_is_being_built_nothing_is_scored() -> None:
    bench = Bench()
    bench.core.set_scoring(ScoringPlan(FP32, share=1.0, time_share=1.0))
    bench.core.set_preparing(True)
    bench.submit(entry())
    bench.run()
    bench.core.score()
    assert (bench.observed, bench.core.patience()) == ([], math.inf)
