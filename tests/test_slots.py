"""Two engines in one step loop, on the toy model: sequences move between blocks and slots, and no token shows it."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.fakes import (
    FakeCache,
    FakeGraph,
    FakeSlotCache,
    FakeSlotGraph,
    assert_right_answer,
    fake_graphs,
    toy_answer,
    toy_logits,
)

from dskd.config import SchedulerConfig
from dskd.engine import slot_decoder
from dskd.engine.engine_choice import Situation
from dskd.engine.request import (
    BlockScore,
    FinishReason,
    GenerationRequest,
    InFlight,
    MadeToken,
    NonFinite,
    Observation,
    ScoringPlan,
    StepOutput,
)
from dskd.engine.slot_decoder import SecondEngine
from dskd.engine.step_loop import StepLoop
from dskd.engine.step_times import StepKind, StepTimes
from dskd.monitor.shadow import score
from dskquant.modes import LADDER

INT4, INT8, FP16, FP32 = LADDER
QUANTIZED = frozenset({INT4, INT8})
SLOTS = 4
T = TypeVar("T")


class Bench:
    """A loop over two toy engines, driven step by step; `in_slots` is what the choice says."""

    def __init__(
        self,
        num_blocks: int = 256,
        config: SchedulerConfig | None = None,
        longest: int = 256,
        explores: bool = False,
    ) -> None:
        self.cache = FakeCache(num_blocks)
        self.slots = FakeSlotCache(SLOTS, longest)
        self.times = StepTimes()
        self.in_slots: Callable[[Situation], bool] = lambda situation: True
        self.outputs: dict[str, list[StepOutput]] = defaultdict(list)
        self.observed: list[Observation] = []
        self.scored = threading.Semaphore(0)
        self.loop = StepLoop(
            model="toy",
            engine_name="paged",
            cache=self.cache,
            config=config or SchedulerConfig(),
            mode=INT4,
            generation=1,
            deliver=self._deliver,
            observe=self._observe,
            second=SecondEngine(
                "slots", self.slots, lambda situation: self.in_slots(situation), self.times, explores=explores
            ),
        )
        self.graphs = self.install(1)

    def install(self, generation: int) -> tuple[FakeGraph, FakeSlotGraph]:
        """Graphs of all modes; FP16 has none over slots. Returns those of INT4 and INT8."""
        graphs = fake_graphs(self.cache, generation)
        slot_graphs = {modes: FakeSlotGraph(modes, generation) for modes in graphs if FP16 not in modes}
        for modes, graph in graphs.items():
            slot_graph = slot_graphs.get(modes)
            if slot_graph:
                slot_graph.bind(self.slots)
            self.now(self.loop.install(generation, graph, slot_graph))
        return graphs[QUANTIZED], slot_graphs[QUANTIZED]

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)

    def _observe(self, observations: list[Observation]) -> None:
        self.observed += observations
        if any(isinstance(seen, BlockScore) for seen in observations):
            self.scored.release()

    def now(self, future: Future[T]) -> T:
        self.loop.apply_commands()
        return future.result(timeout=0)

    def submit(self, name: str, prompt: tuple[int, ...] = (1, 2, 3), new: int = 8, **options: Any) -> None:
        self.now(self.loop.submit(GenerationRequest(name, prompt, new, **options)))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.run_one_step()

    def run_all(self) -> None:
        while self.loop.snapshot().running + self.loop.snapshot().waiting:
            self.step()

    def tokens(self, name: str) -> list[MadeToken]:
        return [token for output in self.outputs[name] for token in output.tokens]

    def engines(self, name: str) -> list[str]:
        return [token.engine for token in self.tokens(name)]

    def last(self, name: str) -> StepOutput:
        assert self.outputs[name][-1].is_last
        return self.outputs[name][-1]

    def check_end(self) -> None:
        """Blocks and slots are free again."""
        self.loop._core.check()
        now = self.loop.snapshot()
        assert (now.running, now.waiting, now.slots_used) == (0, 0, 0)
        assert now.blocks_free == now.blocks_total


def test_a_prompt_is_read_in_blocks_and_its_answer_made_in_slots() -> None:
    bench = Bench()
    bench.submit("a", (5, 6, 7, 8, 9, 10), new=6)
    bench.run_all()
    assert [token.id for token in bench.tokens("a")] == toy_answer((5, 6, 7, 8, 9, 10), [(INT4, 1)] * 6)
    assert bench.engines("a") == ["paged"] + ["slots"] * 5
    assert bench.loop.snapshot().tokens_by_engine == {"paged": 1, "slots": 5}
    assert bench.loop.snapshot().moves == 1
    bench.check_end()


def test_an_answer_that_moves_at_every_step_is_that_of_one_that_never_moves() -> None:
    bench = Bench()
    bench.in_slots = lambda situation: not situation.in_slots
    bench.submit("a", new=40)
    bench.run_all()
    assert [token.id for token in bench.tokens("a")] == toy_answer((1, 2, 3), [(INT4, 1)] * 40)
    assert bench.engines("a") == ["paged", *["slots", "paged"] * 19, "slots"]
    bench.check_end()


def test_only_what_the_other_side_lacks_is_moved() -> None:
    """The first move reads the whole context; later ones what was made since, from the begin of its block on."""
    bench = Bench()
    bench.submit("a", tuple(range(1, 41)), new=30)
    bench.step(2)  # the prompt, then a token in a slot
    assert bench.slots.loaded == 40
    assert bench.slots.stored == 0
    bench.in_slots = lambda situation: False
    bench.step()
    assert bench.slots.stored == 1  # token 40, alone in its block
    bench.in_slots = lambda situation: True
    bench.step()
    assert bench.slots.loaded == 40 + 2  # tokens 40 and 41
    bench.step(20)
    assert bench.slots.loaded == 40 + 2


def test_blocks_that_fill_in_a_slot_are_shared_like_any_other() -> None:
    bench = Bench()
    bench.submit("a", (1, 2, 3, 4, 5), new=12)
    bench.run_all()
    said = tuple(token.id for token in bench.tokens("a"))
    bench.submit("b", (1, 2, 3, 4, 5, *said, 7, 7), new=4)
    paged, _ = bench.graphs
    paged.batches.clear()
    bench.run_all()
    assert len(paged.batches[0].token_ids) == 3  # 16 of its 19 tokens lay in blocks
    assert_right_answer((1, 2, 3, 4, 5, *said, 7, 7), bench.tokens("b"))


def test_more_streams_than_slots_decode_in_blocks_and_come_back_when_they_are_few() -> None:
    bench = Bench()
    for index in range(SLOTS + 1):
        bench.submit(f"s{index}", (index, 2, 3), new=6 if index < 2 else 12)
    bench.run_all()
    for index in range(SLOTS + 1):
        assert_right_answer((index, 2, 3), bench.tokens(f"s{index}"))
    assert bench.engines("s0") == ["paged"] * 6
    assert bench.engines("s4") == ["paged"] * 6 + ["slots"] * 6
    bench.check_end()


def test_the_slots_of_a_step_are_neighbours_whoever_has_ended() -> None:
    bench = Bench()
    for index in range(4):
        bench.submit(f"s{index}", (index, 2, 3), new=30)
    bench.step(3)
    bench.now(bench.loop.cancel("s1"))
    bench.step()
    _, graph = bench.graphs
    assert (graph.batches[-1].first_slot, len(graph.batches[-1].past_lens)) in {(0, 3), (1, 3)}
    assert bench.slots.copied == 5  # the three tokens of a prompt and two of its answer
    bench.run_all()
    for name in ("s0", "s2", "s3"):
        assert_right_answer((int(name[1]), 2, 3), bench.tokens(name))
    assert bench.last("s1").finish is FinishReason.CANCELLED
    bench.check_end()


def test_rows_of_int4_and_int8_decode_in_one_run() -> None:
    bench = Bench()
    bench.submit("a", (1, 2), new=6)
    bench.submit("b", (3, 4), new=6, precision=INT8)
    bench.run_all()
    for name, prompt in (("a", (1, 2)), ("b", (3, 4))):
        assert_right_answer(prompt, bench.tokens(name))
    assert {token.mode for token in bench.tokens("b")} == {INT8}
    _, graph = bench.graphs
    assert {len(batch.past_lens) for batch in graph.batches} == {2}


def test_modes_that_the_second_engine_lacks_decode_in_blocks() -> None:
    bench = Bench()
    bench.submit("a", (1, 2), new=6, precision=FP16)
    bench.submit("b", (3, 4), new=6)
    bench.run_all()
    assert set(bench.engines("a")) == {"paged"}
    assert bench.engines("b") == ["paged"] + ["slots"] * 5
    assert_right_answer((1, 2), bench.tokens("a"))


def test_two_graphs_have_their_slots_side_by_side() -> None:
    bench = Bench()
    bench.submit("a", (1, 2), new=9)
    bench.submit("b", (3, 4), new=9, precision=FP32)
    bench.run_all()
    for name, prompt in (("a", (1, 2)), ("b", (3, 4))):
        assert_right_answer(prompt, bench.tokens(name))
        assert bench.engines(name) == ["paged"] + ["slots"] * 8
    assert bench.slots.loaded == 4  # the two prompts, once
    assert bench.slots.copied == 0


def test_a_sequence_that_does_not_fit_a_slot_stays_in_blocks() -> None:
    bench = Bench(longest=16)
    bench.submit("short", (1, 2), new=15)  # its last token is never cached
    bench.run_all()
    assert "slots" in bench.engines("short")
    bench.submit("long", (1, 2), new=16)
    bench.run_all()
    assert set(bench.engines("long")) == {"paged"}


def test_a_switch_and_a_swap_go_on_in_the_slot() -> None:
    bench = Bench()
    bench.install(2)
    bench.submit("a", new=12)
    bench.step(4)
    bench.now(bench.loop.flip(INT8, 1, InFlight.MIGRATE))
    bench.step(4)
    bench.now(bench.loop.flip(INT4, 2, InFlight.MIGRATE))
    loaded = bench.slots.loaded
    bench.run_all()
    assert_right_answer((1, 2, 3), bench.tokens("a"))
    labels = [(token.mode, token.generation) for token in bench.tokens("a")]
    assert labels == [(INT4, 1)] * 4 + [(INT8, 1)] * 4 + [(INT4, 2)] * 4
    assert bench.engines("a") == ["paged"] + ["slots"] * 11
    assert bench.slots.loaded == loaded


def test_a_graph_that_is_retired_or_evicted_takes_its_slots_graph_with_it() -> None:
    bench = Bench()
    bench.submit("a", new=12)
    bench.step(3)
    bench.now(bench.loop.suspend(1, QUANTIZED))
    paged = FakeGraph(QUANTIZED)
    paged.bind(bench.cache)
    bench.now(bench.loop.install(1, paged))  # it comes back without the other one
    bench.now(bench.loop.resume())
    bench.run_all()
    assert_right_answer((1, 2, 3), bench.tokens("a"))
    assert bench.engines("a") == ["paged", "slots", "slots"] + ["paged"] * 9


def test_a_second_engine_that_fails_is_given_up_and_no_answer_notices() -> None:
    bench = Bench()
    bench.submit("a", new=12)
    bench.step(4)

    def fail(batch: object) -> None:
        raise RuntimeError("broken")

    _, graph = bench.graphs
    graph.on_run = fail
    with capture_logs() as logs:
        bench.run_all()
    assert [entry["event"] for entry in logs] == ["decoding in slots failed and is given up"]
    assert_right_answer((1, 2, 3), bench.tokens("a"))
    assert bench.engines("a") == ["paged"] + ["slots"] * 3 + ["paged"] * 8
    assert len(graph.batches) == 4


def test_logits_that_are_not_finite_are_redone_from_the_start() -> None:
    bench = Bench()
    answer = toy_answer((1, 2, 3), [(INT4, 1)] * 6)
    _, graph = bench.graphs
    graph.poison = answer[2]
    bench.submit("a", new=6)
    with capture_logs():
        bench.run_all()
    assert [token.id for token in bench.tokens("a")][:3] == answer[:3]
    assert_right_answer((1, 2, 3), bench.tokens("a"))
    assert {token.mode for token in bench.tokens("a")[3:]} == {FP32}
    assert [seen.redone_in for seen in bench.observed if isinstance(seen, NonFinite)] == [FP32]
    bench.check_end()


def test_shadow_scores_see_the_context_that_was_served_in_slots() -> None:
    """The reference reads the whole blocks before the scored one: they have been made in a slot."""
    bench = Bench()
    bench.now(bench.loop.set_scoring(ScoringPlan(INT8, 1.0, 1.0)))
    bench.submit("a", (1, 2, 3), new=30)
    while bench.loop._core.has_work:
        bench.loop.run_one_step()
    for _ in range(7):  # positions 4 to 31
        assert bench.scored.acquire(timeout=20)
    bench.loop.stop()
    scores = [seen for seen in bench.observed if isinstance(seen, BlockScore)]
    assert "slots" in bench.engines("a")
    context = [1, 2, 3, *(token.id for token in bench.tokens("a"))]
    int8, int4 = (
        np.array([toy_logits(context[: position + 1], mode, 1) for position in range(4, 32)]) for mode in (INT8, INT4)
    )
    expected = score(int8, int4, np.array(context[5:]))
    np.testing.assert_allclose(np.concatenate([seen.kl for seen in scores]), expected.kl, rtol=1e-6)


def test_step_times_are_learned_by_engine_mode_and_rows() -> None:
    bench = Bench()
    bench.submit("a", new=4)
    bench.submit("b", new=4, precision=INT8)
    bench.run_all()
    bench.in_slots = lambda situation: False
    bench.submit("c", new=4)
    bench.run_all()
    assert set(bench.times.known) == {StepKind("slots", INT8, 2), StepKind("paged", INT4, 1)}
    assert all(seconds > 0 for seconds in bench.times.known.values())


def test_a_choice_knows_the_times_and_where_the_sequences_are() -> None:
    bench = Bench()
    bench.times.set(StepKind("paged", INT4, 1), 0.5)
    bench.times.set(StepKind("slots", INT4, 1), 0.25)
    seen: list[Situation] = []

    def choose(situation: Situation) -> bool:
        seen.append(situation)
        return len(seen) > 2

    bench.in_slots = choose
    bench.submit("a", new=6)
    bench.run_all()
    assert [situation.in_slots for situation in seen] == [False, False, False, True, True]
    assert [situation.steps for situation in seen[3:]] == [0, 1]
    assert (seen[0].paged_s, seen[0].slots_s) == (0.5, 0.25)
    assert seen[2].move_s == 0.0  # nothing is known of moves yet


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(12, 40))
def test_whatever_happens_between_steps_answers_are_those_of_their_labels(seed: int, num_blocks: int) -> None:
    """Moves, switches, swaps, cancellations, preemptions and shared prefixes, at random."""
    rng = random.Random(seed)
    bench = Bench(num_blocks, SchedulerConfig(max_batch_tokens=16, max_sequences=6), longest=rng.choice([16, 64]))
    bench.install(2)
    bench.in_slots = lambda situation: rng.random() < 0.6
    prompts: dict[str, tuple[int, ...]] = {}
    for turn in range(120):
        what = rng.random()
        if what < 0.2 and bench.loop.snapshot().waiting < 4:
            name = f"r{turn}"
            prompts[name] = tuple(range(1, rng.randint(2, 14)))
            precision = rng.choice([None, None, None, INT8, FP32])
            bench.submit(name, prompts[name], rng.randint(1, 20), precision=precision)
        elif what < 0.25 and prompts:
            bench.now(bench.loop.cancel(rng.choice(list(prompts))))
        elif what < 0.32:
            mode, generation = rng.choice([INT4, INT8, FP32, FP16]), rng.choice([1, 2])
            bench.now(bench.loop.flip(mode, generation, rng.choice(list(InFlight))))
        elif what < 0.35:
            names = list(prompts)
            if names:
                bench.now(bench.loop.escalate(rng.choice(names), FP32, repair=rng.random() < 0.5))
        else:
            bench.step()
    bench.run_all()
    for name, prompt in prompts.items():
        assert bench.last(name).error is None
        assert_right_answer(prompt, bench.tokens(name))
    bench.check_end()


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_over_slots_changes_nothing_while_it_is_not_chosen(count: int) -> None:
    bench = Bench()
    bench.in_slots = lambda situation: False
    for index in range(count):
        bench.submit(f"s{index}", (index, 5), new=5)
    bench.run_all()
    assert all(set(bench.engines(f"s{index}")) == {"paged"} for index in range(count))
    assert bench.slots.loaded == bench.slots.stored == 0
    assert bench.loop.snapshot().moves == 0


@pytest.mark.parametrize(("in_slots", "engine"), [(True, "paged"), (False, "slots")])
def test_when_nobody_waits_a_step_like_the_last_is_timed_on_the_other_engine(
    in_slots: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(explores=True)
    bench.in_slots = lambda situation: in_slots
    for name in "ab":
        bench.submit(name, new=4)
    bench.run_all()
    unused = StepKind(engine, INT4, 2)
    assert unused in bench.times.known
    graph, slot_graph = bench.graphs
    runs = len(graph.batches) + len(slot_graph.batches)
    for name in "cd":
        bench.submit(name, new=4)
    bench.run_all()
    steps = len(graph.batches) + len(slot_graph.batches) - runs
    assert steps == 4  # it is known well enough
    learned = bench.times.learned(unused)
    monkeypatch.setattr(slot_decoder, "STALE_S", 0.0)
    bench.submit("e", new=4)
    bench.run_all()
    assert StepKind(engine, INT4, 1) in bench.times.known
    assert bench.times.learned(unused) == learned
    bench.check_end()


def test_a_step_that_cannot_be_timed_is_no_fault_of_any_answer() -> None:
    bench = Bench(explores=True)
    bench.in_slots = lambda situation: False

    def fail(batch: object) -> None:
        raise RuntimeError("broken")

    bench.graphs[1].on_run = fail
    bench.submit("a", new=4)
    with capture_logs() as logs:
        bench.run_all()
    assert bench.engines("a") == ["paged"] * 4
    assert [entry["event"] for entry in logs] == ["a step could not be timed"]
    bench.check_end()
