"""Shadow scoring and modes of single steps, on the toy model: what is measured is right, and disturbs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeCache, FakeGraph, assert_right_answer, fake_graphs, toy_logits

from dskd.config import SchedulerConfig
from dskd.engine import step_core
from dskd.engine.block_pool import BlockPool
from dskd.engine.graph_table import GraphTable
from dskd.engine.request import (
    BlockScore,
    GenerationRequest,
    HealthSample,
    InFlight,
    MadeToken,
    ModeRules,
    Observation,
    ScoringPlan,
    StepOutput,
)
from dskd.engine.scheduler import Scheduler
from dskd.engine.shadow import ShadowScorer
from dskd.engine.step_loop import StepLoop
from dskd.monitor.config import LongContextConfig, MonitorConfig
from dskquant.engines.protocol import Logits, StepBatch
from dskquant.modes import LADDER, QUANTIZED, PrecisionMode

INT4, INT8, FP16, FP32 = LADDER
ALL = 1.0
"""Every block is scored; time is no object."""


class SoftGraph(FakeGraph):
    """Toy logits of such a scale that the modes differ by a nat or so: a KL of dozens would hide small mistakes."""

    def run(self, batch: StepBatch) -> Logits:
        return super().run(batch) * np.float32(0.3)


class Bench:
    """A loop that is driven synchronously, and what it tells."""

    def __init__(self, num_blocks: int = 256, config: SchedulerConfig | None = None) -> None:
        self.cache = FakeCache(num_blocks)
        self.tokens: dict[str, list[MadeToken]] = {}
        self.ended: set[str] = set()
        self.observed: list[Observation] = []
        self.scored = threading.Semaphore(0)
        self.loop = StepLoop(
            model="toy",
            engine_name="toy",
            cache=self.cache,
            config=config or SchedulerConfig(prefix_cache=False),
            mode=INT4,
            generation=1,
            deliver=self._deliver,
            observe=self._observe,
        )
        self.graphs = {modes: SoftGraph(modes) for modes in fake_graphs(self.cache)}
        for graph in self.graphs.values():
            graph.bind(self.cache)
            self.now(self.loop.install(1, graph))

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.is_last:
                self.ended.add(output.request_id)

    def _observe(self, observations: list[Observation]) -> None:
        self.observed += observations
        if any(isinstance(seen, BlockScore) for seen in observations):
            self.scored.release()

    def now(self, future: Any) -> Any:
        self.loop.apply_commands()
        return future.result(timeout=0)

    def submit(self, name: str, prompt: tuple[int, ...], new: int, **options: Any) -> None:
        self.now(self.loop.submit(GenerationRequest(name, prompt, new, **options)))

    def run_all(self) -> None:
        while self.loop._core.has_work:
            self.loop.apply_commands()
            self.loop.run_one_step()

    def scores(self, count: int) -> list[BlockScore]:
        """Runs until `count` blocks have been scored."""
        for _ in range(count):
            self.run_all()
            assert self.scored.acquire(timeout=20)
            self.end_beside()
        return [seen for seen in self.observed if isinstance(seen, BlockScore)]

    def end_beside(self) -> None:
        """Waits for the loop to be told that the thread has ended a run."""
        while self.loop._core._scorer._beside is not None:
            self.loop._commands.wait()
            self.loop.apply_commands()

    def close(self) -> None:
        self.loop.stop()


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.close()


def kl_of(reference: Logits, served: Logits) -> float:
    """By the definition, in float64."""
    p, q = (np.exp(logits.astype(np.float64) - logits.max()) for logits in (reference, served))
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


def expected_kl(prompt: tuple[int, ...], made: list[MadeToken], mode: PrecisionMode, by: PrecisionMode) -> list[float]:
    """Of every made token: how far `mode` is from `by` at its position."""
    context, scores = list(prompt), []
    for token in made:
        scores.append(kl_of(toy_logits(context, by, 1) * 0.3, toy_logits(context, mode, 1) * 0.3))
        context.append(token.id)
    return scores


@pytest.mark.parametrize(("is_preparing", "earned"), [(False, 0.08), (True, 0.02)])
def test_while_a_graph_is_built_a_quarter_of_the_time_may_be_spent(is_preparing: bool, earned: float) -> None:
    scorer = ShadowScorer(GraphTable(), lambda seen: None, lambda call: None)
    scorer.set_plan(ScoringPlan(INT8, ALL, 0.02), Scheduler(SchedulerConfig(), BlockPool(4, 4)))
    scorer.is_thrifty = is_preparing
    scorer.earn(4.0)
    for is_allowed in (True, False):
        scorer._budget.spend(0.49 * earned)
        assert scorer._budget.allows == is_allowed


@pytest.mark.parametrize("reference", [INT8, FP16, FP32])
@pytest.mark.parametrize("own_context", [False, True])
def test_every_position_of_a_scored_block_has_the_kl_of_its_two_modes(
    bench: Bench, reference: PrecisionMode, own_context: bool
) -> None:
    """Positions 7 to 22 in blocks of 4: of the first and the last block there is too little to be worth a run."""
    bench.now(bench.loop.set_scoring(ScoringPlan(reference, ALL, ALL, own_context)))
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    bench.submit("a", prompt, 16)
    scores = bench.scores(3)
    made = bench.tokens["a"]
    assert {token.mode for token in made} == {INT4}
    assert_right_answer(prompt, made)
    expected = expected_kl(prompt, made, INT4, reference)
    measured = np.concatenate([score.kl for score in scores])
    np.testing.assert_allclose(measured, expected[1:13], rtol=1e-4)
    assert {(score.mode, score.reference, score.generation, score.is_probe) for score in scores} == {
        (INT4, reference, 1, False)
    }
    bench.loop._core.check()


def test_agreement_and_rank_are_those_of_the_served_token(bench: Bench) -> None:
    bench.now(bench.loop.set_scoring(ScoringPlan(FP32, ALL, ALL)))
    prompt = (1, 2, 3, 4)
    bench.submit("a", prompt, 5)
    (score,) = bench.scores(1)
    made = [token.id for token in bench.tokens["a"]]
    for index in range(len(score.kl)):
        reference = toy_logits([*prompt, *made[: index + 1]], FP32, 1)
        assert score.rank[index] == (reference > reference[made[index + 1]]).sum()
        assert score.agrees[index] == (reference.argmax() == made[index + 1])


def test_answers_are_the_same_with_and_without_scoring(bench: Bench) -> None:
    quiet = Bench()
    for each in (bench, quiet):
        for index in range(6):
            each.submit(f"r{index}", (index, 9, 9), 40)
    bench.now(bench.loop.set_scoring(ScoringPlan(INT8, ALL, ALL)))
    bench.run_all()
    quiet.run_all()
    assert bench.tokens == quiet.tokens
    quiet.close()


def test_a_share_of_nothing_scores_nothing_and_a_share_scores_its_part(bench: Bench) -> None:
    bench.now(bench.loop.set_scoring(ScoringPlan(INT8, 0.0, ALL)))
    bench.submit("a", (1, 2, 3, 4), 100)
    bench.run_all()
    assert not any(isinstance(seen, BlockScore) for seen in bench.observed)
    bench.now(bench.loop.set_scoring(ScoringPlan(INT8, 0.25, ALL)))
    bench.submit("b", (1, 2, 3, 4), 161)
    scores = bench.scores(9)
    assert 9 <= len(scores) <= 11  # of 40 full blocks


def test_without_time_nothing_is_scored_while_requests_run(bench: Bench) -> None:
    bench.now(bench.loop.set_scoring(ScoringPlan(INT8, ALL, 0.0)))
    bench.submit("a", (1, 2, 3, 4), 60)
    while "a" not in bench.ended:
        bench.loop.run_one_step()
    graph = next(graph for modes, graph in bench.graphs.items() if INT4 in modes)
    assert all(len(batch.token_ids) in (1, 4) and not len(batch.residual_rows) for batch in graph.batches[:-1])


def test_while_a_higher_mode_serves_the_probe_is_scored_in_its_shadow(bench: Bench) -> None:
    bench.now(bench.loop.flip(FP32, 1, InFlight.MIGRATE))
    bench.now(bench.loop.set_scoring(ScoringPlan(FP32, ALL, ALL, probe=INT4)))
    prompt = (1, 2, 3, 4)
    bench.submit("a", prompt, 9)
    scores = bench.scores(2)
    expected = expected_kl(prompt, bench.tokens["a"], INT4, FP32)
    np.testing.assert_allclose(np.concatenate([score.kl for score in scores]), expected[1:9], rtol=1e-4)
    assert {(score.mode, score.reference, score.is_probe) for score in scores} == {(INT4, FP32, True)}


def test_a_mode_that_is_not_finite_scores_infinity_and_a_reference_that_is_not_scores_nothing(bench: Bench) -> None:
    bench.now(bench.loop.set_scoring(ScoringPlan(FP32, ALL, ALL, probe=INT4)))
    bench.now(bench.loop.flip(FP32, 1, InFlight.MIGRATE))
    for graph in bench.graphs.values():
        if INT4 in graph.modes:
            graph.on_run = lambda batch: None
            graph.poison = -1  # never
    sick = next(graph for graph in bench.graphs.values() if INT4 in graph.modes)
    run: Callable[[StepBatch], Logits] = sick.run
    sick.run = lambda batch: run(batch) * np.float32(np.nan)  # type: ignore[method-assign]
    bench.submit("a", (1, 2, 3, 4), 5)
    (score,) = bench.scores(1)
    assert np.isinf(score.kl).all()
    assert not score.agrees.any()


def test_health_is_told_of_made_tokens(bench: Bench) -> None:
    bench.submit("a", (1, 2, 3), 4)
    bench.run_all()
    samples = [seen for seen in bench.observed if isinstance(seen, HealthSample)]
    context = [1, 2, 3]
    for sample, token in zip(samples, bench.tokens["a"], strict=True):
        logits = toy_logits(context, INT4, 1).astype(np.float64) * np.float32(0.3)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        assert sample.entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-3)
        first, second = np.sort(logits)[:-3:-1]
        assert sample.margin == pytest.approx(first - second, rel=1e-3)
        context.append(token.id)


# Modes of single steps


def test_a_prompt_is_read_in_its_own_mode_and_answered_in_the_models(bench: Bench) -> None:
    bench.now(bench.loop.set_rules(ModeRules(MonitorConfig(prefill=INT8)), repair=False))
    bench.submit("a", (1, 2, 3, 4, 5), 5)
    bench.run_all()
    assert [token.mode for token in bench.tokens["a"]] == [INT8, INT4, INT4, INT4, INT4]
    assert_right_answer((1, 2, 3, 4, 5), bench.tokens["a"])


def test_from_a_length_on_the_mode_is_a_higher_one(bench: Bench) -> None:
    rules = ModeRules(MonitorConfig(long_context=LongContextConfig(6, FP16)))
    bench.now(bench.loop.set_rules(rules, repair=False))
    bench.submit("a", (1, 2, 3), 6)
    bench.submit("own", (1, 2, 3), 6, precision=INT8)
    bench.run_all()
    assert [token.mode for token in bench.tokens["a"]] == [INT4, INT4, INT4, FP16, FP16, FP16]
    assert {token.mode for token in bench.tokens["own"]} == {INT8}


def test_a_fallback_serves_all_that_follow_the_model_from_the_next_step_on(bench: Bench) -> None:
    bench.submit("a", (1, 2, 3), 6)
    bench.submit("own", (1, 2, 3), 6, precision=INT4)
    for _ in range(2):
        bench.loop.run_one_step()
    bench.now(bench.loop.set_rules(ModeRules(fallback=FP32), repair=False))
    bench.submit("late", (4, 5), 2)
    bench.run_all()
    assert [token.mode for token in bench.tokens["a"]] == [INT4] * 2 + [FP32] * 4
    assert {token.mode for token in bench.tokens["own"]} == {INT4}
    assert {token.mode for token in bench.tokens["late"]} == {FP32}
    bench.now(bench.loop.set_rules(ModeRules(), repair=False))
    bench.submit("healed", (4, 5), 2)
    bench.run_all()
    assert {token.mode for token in bench.tokens["healed"]} == {INT4}


def test_repair_reads_the_whole_context_again_in_the_fallback(bench: Bench) -> None:
    bench.submit("a", (1, 2, 3), 6)
    for _ in range(3):
        bench.loop.run_one_step()
    bench.now(bench.loop.set_rules(ModeRules(fallback=FP32), repair=True))
    bench.run_all()
    graph = bench.graphs[frozenset({FP32})]
    assert graph.batches[0].past_lens.tolist() == [0]
    assert len(graph.batches[0].token_ids) == 6
    assert_right_answer((1, 2, 3), bench.tokens["a"])
    bench.loop._core.check()


def test_one_request_is_escalated_and_the_others_are_not(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.submit(name, (1, 2, 3), 6)
    bench.submit("own", (1, 2, 3), 6, precision=INT8)
    bench.loop.run_one_step()
    assert bench.now(bench.loop.escalate("a", FP32, True))
    assert not bench.now(bench.loop.escalate("own", FP32, True))
    assert not bench.now(bench.loop.escalate("gone", FP32, True))
    bench.run_all()
    assert [token.mode for token in bench.tokens["a"]] == [INT4] + [FP32] * 5
    assert {token.mode for token in bench.tokens["b"]} == {INT4}
    assert_right_answer((1, 2, 3), bench.tokens["a"])


def test_an_escalated_request_keeps_its_pace_and_gets_the_whole_answer_in_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: sum(spent), perf_counter_ns=time.perf_counter_ns)
    monkeypatch.setattr(step_core, "time", clock)
    bench.graphs[QUANTIZED].on_run = lambda batch: spent.append(0.01)
    bench.graphs[frozenset({FP32})].on_run = lambda batch: spent.append(0.02)
    for name in ("a", "b"):
        bench.submit(name, (1, 2, 3), 50)
    bench.loop.run_one_step()
    bench.loop.run_one_step()
    assert bench.now(bench.loop.escalate("a", FP32, repair=False))
    while "b" not in bench.ended:
        bench.loop.run_one_step()
    assert len(bench.tokens["a"]) == 4  # two before, one at once, one when 0.02 s were earned at 5 % of 0.01 s a step
    bench.run_all()
    assert len(bench.tokens["a"]) == 50
    assert_right_answer((1, 2, 3), bench.tokens["a"])
    bench.loop._core.check()


def test_a_graph_that_is_running_in_the_shadow_is_not_retired(bench: Bench) -> None:
    started, gate = threading.Event(), threading.Event()

    def wait(batch: StepBatch) -> None:
        started.set()
        assert gate.wait(20)

    bench.graphs[frozenset({FP32})].on_run = wait
    bench.now(bench.loop.set_scoring(ScoringPlan(FP32, ALL, ALL)))
    bench.submit("a", (1, 2, 3, 4), 5)
    bench.run_all()
    assert started.wait(20)
    assert not bench.now(bench.loop.retire(1, frozenset({FP32})))
    gate.set()
    assert bench.scored.acquire(timeout=20)
    bench.loop.apply_commands()
    bench.loop.stop()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_under_any_traffic_scores_are_right_and_no_block_is_lost(data: st.DataObject) -> None:
    """Small pools, preemptions, cancels, flips, fallbacks and escalations, everything scored."""
    bench = Bench(14, SchedulerConfig(max_batch_tokens=16, max_sequences=4))
    bench.now(bench.loop.set_scoring(ScoringPlan(INT8, ALL, ALL, own_context=data.draw(st.booleans()))))
    prompts = {}
    for step in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(["submit", "cancel", "flip", "rules", "escalate", "step", "step", "step"]))
        mode = data.draw(st.sampled_from(LADDER))
        if action == "submit":
            prompts[f"r{step}"] = tuple(data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=12)))
            bench.submit(f"r{step}", prompts[f"r{step}"], data.draw(st.integers(1, 16)))
        elif action == "cancel" and prompts:
            bench.now(bench.loop.cancel(data.draw(st.sampled_from(sorted(prompts)))))
        elif action == "flip":
            bench.now(bench.loop.flip(mode, 1, data.draw(st.sampled_from(InFlight))))
        elif action == "rules":
            bench.now(bench.loop.set_rules(ModeRules(fallback=mode), data.draw(st.booleans())))
        elif action == "escalate" and prompts:
            bench.now(bench.loop.escalate(data.draw(st.sampled_from(sorted(prompts))), mode, data.draw(st.booleans())))
        else:
            bench.loop.run_one_step()
    bench.run_all()
    bench.end_beside()
    bench.loop._core.check()
    for name, prompt in prompts.items():
        assert_right_answer(prompt, bench.tokens.get(name, []))
    bench.close()
    for score in bench.observed:
        if isinstance(score, BlockScore):
            assert (score.kl >= 0).all()
            assert (score.mode, score.reference) == (INT4, INT8)
