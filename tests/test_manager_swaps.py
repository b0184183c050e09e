"""Parameter sets swapped under a QuantizerManager on a toy engine: as a whole or not at all, at no request's cost.

The toy model computes with the "salt" of a set; the float modes have one of their own, as they run the source weights.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.fake_host import MANIFEST, asynchronous, tiny_codec
from tests.fakes import FakeGraph, toy_logits

from dskd.config import ModelConfig, ProofConfig, SchedulerConfig, SwapPolicy
from dskd.engine.request import GenerationRequest, InFlight, MadeToken
from dskd.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from dskd.manager.depot import SetDepot
from dskd.manager.events import Event, EventBus, Subscription
from dskd.manager.history import History
from dskd.manager.manager import QuantizerManager
from dskd.manager.state_file import Committed
from dskd.manager.types import Change, ChangeReport, SetReference
from dskd.monitor.config import MonitorConfig
from dskd.units import ByteSize
from dskquant.engines.protocol import CompileOptions, Logits, StepBatch, WeightSource
from dskquant.errors import StoreError
from dskquant.modes import LADDER, QUANTIZED, PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.store import DEFAULT_PARAMETER_SET, IR_BIN, TOKENIZER, file_sha256
from dskquant.store import MANIFEST as MANIFEST_NAME

INT4, INT8, FP16, FP32 = LADDER
PROMPT = (1, 2, 3)
WEIGHTS = "0" * 64
UNMEASURED = MonitorConfig(share=0.0)
"""No two modes of the toy model ever agree, which is nothing to act upon."""
LONG = 2_000
"""Tokens of an answer that outlasts a swap."""
NEVER = 1e6
DEFAULT_SALT, FLOAT_SALT = 1, 9
SALTS = {1: DEFAULT_SALT, 2: 2, 3: 3, 4: 4}
"""By generation, where every test applies the sets of salt 2, 3 and 4 in this order."""


class ToyGraph(FakeGraph):
    """`sharpness` multiplies its logits: a large one puts it far away from every reference."""

    sharpness = 1.0

    def run(self, batch: StepBatch) -> Logits:
        return super().run(batch) * self.sharpness


@dataclass
class ToyEngine:
    """Keeps the graphs it makes; a compilation waits for `gate`."""

    name: str = "toy"
    block_size: int = 4
    graphs: list[ToyGraph] = field(default_factory=list)
    error: Exception | None = None
    sharp_salts: frozenset[int] = frozenset()  # sets whose graphs are far away from every reference
    needed_bytes: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    open_at_compile: list[int] = field(default_factory=list)  # quantized graphs in memory whenever one was compiled

    def __post_init__(self) -> None:
        self.gate.set()

    def weights(self, store: Path) -> Sequence[WeightSource]:
        raise NotImplementedError

    def compile(
        self,
        store: Path,
        modes: Collection[PrecisionMode],
        options: CompileOptions,
        parameters: ParameterSet | None = None,
    ) -> ToyGraph:
        assert self.gate.wait(20), "nobody opened the gate"
        self.open_at_compile.append(sum(not graph.is_closed for graph in self.graphs if graph.modes <= QUANTIZED))
        if self.error:
            raise self.error
        assert parameters is not None
        salt = parameters.provenance["salt"] if frozenset(modes) <= QUANTIZED else FLOAT_SALT
        graph = ToyGraph(modes, salt)
        graph.sharpness = 1000.0 if salt in self.sharp_salts else 1.0
        self.graphs.append(graph)
        return graph

    def estimate_bytes(self, store: Path, modes: Collection[PrecisionMode], options: CompileOptions) -> int:
        return self.needed_bytes


def write_set(directory: Path, salt: int) -> Path:
    directory.mkdir(parents=True)
    ParameterSet(directory, "toy", WEIGHTS, {}, {}, provenance={"salt": salt}).write_manifest()
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """What a manager reads of a store: a manifest, a tokenizer for the golden prompts, and a parameter set."""
    folder = tmp_path / "store"
    write_set(folder / DEFAULT_PARAMETER_SET, DEFAULT_SALT)
    tiny_codec(folder)
    (folder / IR_BIN).touch()
    replace(MANIFEST, sha256={IR_BIN: WEIGHTS, TOKENIZER: file_sha256(folder / TOKENIZER)}).write(folder)
    return folder


@dataclass
class Bench:
    """A manager that serves, and what it tells."""

    manager: QuantizerManager
    engine: ToyEngine
    events: Subscription
    history: History
    sets: Path

    @property
    def generation(self) -> int:
        return self.manager.snapshot().generation

    def set_of(self, salt: int) -> SetReference:
        directory = self.sets / str(salt)
        return SetReference(directory if directory.exists() else write_set(directory, salt))

    async def apply(
        self,
        salt: int | None = None,
        mode: PrecisionMode | None = None,
        in_flight: InFlight = InFlight.MIGRATE,
        *,
        dry_run: bool = False,
        wait: bool = True,
    ) -> ChangeReport:
        change = Change(mode, None if salt is None else self.set_of(salt), in_flight=in_flight)
        return await self.manager.apply(change, "test", dry_run=dry_run, wait=wait)

    async def rollback(self, generation: int | None = None) -> ChangeReport:
        return await self.manager.rollback(generation, InFlight.MIGRATE, "test", wait=True)

    async def answer(self, precision: PrecisionMode | None = None, new: int = 6) -> list[MadeToken]:
        """A whole answer, every token of which is what the set of its generation makes."""
        request = GenerationRequest(f"{random.random()}", PROMPT, new, precision=precision)
        made = [token async for output in self.manager.generate(request) for token in output.tokens]
        assert len(made) == new
        assert_right(made)
        return made

    async def generations_of_an_answer(self) -> set[int]:
        return {token.generation for token in await self.answer()}

    async def threshold(self) -> float | None:
        """Of INT4, as of the next round of the monitor."""
        await self.manager._monitor.decide()
        return next((noise.threshold for noise in self.manager.noise(0).modes if noise.mode is INT4), None)

    async def until(self, kind: str, **fields: Any) -> Event:
        async for event in self.events:
            if event.kind == kind and fields.items() <= event.fields.items():
                return event
        raise AssertionError(f"no {kind}")


def assert_right(made: Sequence[MadeToken]) -> None:
    context = list(PROMPT)
    for token in made:
        salt = SALTS[token.generation] if token.mode in QUANTIZED else FLOAT_SALT
        assert token.id == toy_logits(context, token.mode, salt).argmax()
        context.append(token.id)


@asynccontextmanager
async def serving(store: Path, history: History | None = None, **config: Any) -> AsyncIterator[Bench]:
    """A manager over the store that has been started; it is closed at the end."""
    engine, events, history = ToyEngine(), EventBus(), history or History(None)
    lenient = ProofConfig(max_kl=20.0, min_agreement=0.0)  # the modes of the toy model differ by a few nats
    model = ModelConfig(
        store, **{"kv_cache_bytes": ByteSize(1 << 20), "proof": lenient, "monitor": UNMEASURED, **config}
    )
    with events.subscribe() as subscription:
        manager = QuantizerManager("m", model, SchedulerConfig(), engine, state_dir(store), events, history)
        await manager.start()
        try:
            yield Bench(manager, engine, subscription, history, store.parent / "dropped")
        finally:
            engine.gate.set()
            await manager.close(0)
    assert all(graph.is_closed for graph in engine.graphs)


def state_dir(store: Path) -> Path:
    return store.parent / "state"


# Swaps


@asynchronous
async def test_a_set_takes_over_and_the_graphs_of_the_old_one_are_released(store: Path) -> None:
    async with serving(store) as bench:
        report = await bench.apply(2)
        assert (report.from_generation, report.to_generation, report.changed, report.done) == (1, 2, True, True)
        assert report.flip_us > 0
        assert set(report.phases_ms) == {"validate", "build", "prove", "commit"}
        assert [proof.mode for proof in report.proofs] == [INT4, INT8]
        assert all(proof.kl_before is not None for proof in report.proofs)
        assert await bench.generations_of_an_answer() == {2}
        await bench.until("mode.released", generation=1)
        assert [graph.is_closed for graph in bench.engine.graphs] == [True, False]
        (entry,) = bench.history.newest("m", 10)
        assert (entry.kind, entry.outcome, entry.from_generation, entry.generation) == ("apply", "committed", 1, 2)
        assert (entry.parameter_set, entry.proofs) == (report.parameter_set, report.proofs)
        now = bench.manager.snapshot()
        assert [(kept.number, kept.active) for kept in now.generations] == [(2, True), (1, False)]


@asynchronous
async def test_open_requests_go_on_with_the_new_set_and_keep_what_they_have(store: Path) -> None:
    async with serving(store) as bench:
        async with aclosing(bench.manager.generate(GenerationRequest("open", PROMPT, LONG))) as outputs:
            made = list((await anext(outputs)).tokens)
            await bench.apply(2)
            made += [token async for output in outputs for token in output.tokens]
        assert_right(made)
        assert len(made) == LONG
        assert [token.generation for token in made] == sorted(token.generation for token in made)
        assert {token.generation for token in made} == {1, 2}


@asynchronous
async def test_open_requests_finish_on_the_old_set_where_that_is_wanted(store: Path) -> None:
    async with serving(store) as bench:
        async with aclosing(bench.manager.generate(GenerationRequest("open", PROMPT, LONG))) as outputs:
            made = list((await anext(outputs)).tokens)
            await bench.apply(2, in_flight=InFlight.FINISH)
            assert await bench.generations_of_an_answer() == {2}
            made += [token async for output in outputs for token in output.tokens]
        assert_right(made)
        assert {token.generation for token in made} == {1}
        await bench.until("mode.released", generation=1)


@asynchronous
async def test_the_float_graphs_serve_the_new_generation_without_being_built_again(store: Path) -> None:
    async with serving(store, resident=(INT4, INT8, FP32)) as bench:
        async with aclosing(bench.manager.generate(GenerationRequest("open", PROMPT, LONG, precision=FP32))) as outputs:
            made = list((await anext(outputs)).tokens)
            await bench.apply(2)
            made += [token async for output in outputs for token in output.tokens]
        assert_right(made)
        assert {token.generation for token in made} == {1, 2}
        await bench.until("mode.released", generation=1, mode="int4+int8")
        assert [graph.modes for graph in bench.engine.graphs] == [{INT4, INT8}, {FP32}, {INT4, INT8}]
        assert await bench.answer(FP32)


@asynchronous
async def test_the_set_that_serves_is_not_built_again(store: Path) -> None:
    async with serving(store) as bench:
        await bench.apply(2)
        built = len(bench.engine.graphs)
        report = await bench.apply(2)
        assert (report.changed, report.done, report.to_generation) == (False, True, 2)
        assert len(bench.engine.graphs) == built


@asynchronous
async def test_a_set_that_comes_back_has_its_old_number_and_answers_the_same(store: Path) -> None:
    async with serving(store) as bench:
        await bench.apply(2)
        first = await bench.answer()
        await bench.apply(3)
        assert [token.id for token in await bench.answer()] != [token.id for token in first]
        report = await bench.apply(2)
        assert (report.from_generation, report.to_generation) == (3, 2)
        assert await bench.answer() == first


@asynchronous
async def test_mode_and_set_change_in_one_flip(store: Path) -> None:
    async with serving(store) as bench:
        report = await bench.apply(2, FP16)
        assert (report.from_mode, report.to_mode, report.to_generation) == (INT4, FP16, 2)
        assert {(token.generation, token.mode) for token in await bench.answer()} == {(2, FP16)}


# What stands in the way of a swap leaves the old generation serving


async def refused(bench: Bench, salt: int, error: type[Exception], reason: str) -> None:
    before = bench.generation
    with pytest.raises(error, match=reason):
        await bench.apply(salt)
    await bench.until("apply.rejected")
    (entry, *_) = bench.history.newest("m", 1)
    assert (entry.kind, entry.outcome, entry.from_generation) == ("apply", "rejected", before)
    assert bench.generation == before
    assert await bench.generations_of_an_answer() == {before}


@asynchronous
async def test_a_set_far_from_the_reference_is_refused(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.sharp_salts = frozenset({2})
        await refused(bench, 2, FailedPreconditionError, "int8 failed its proof: .* mean KL")
        assert bench.engine.graphs[-1].is_closed


@asynchronous
async def test_a_set_that_does_not_fit_into_memory_is_refused_with_the_numbers(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.needed_bytes = 1 << 50
        await refused(bench, 2, ResourceExhaustedError, r"loading int4\+int8 needs 1024\.0 TiB, available are")


@asynchronous
async def test_a_set_that_is_not_there_or_made_for_other_weights_is_refused(store: Path) -> None:
    async with serving(store) as bench:
        (bench.set_of(2).path or Path()).joinpath(MANIFEST_NAME).unlink()
        await refused(bench, 2, StoreError, "manifest")
        other = bench.set_of(3).path or Path()
        ParameterSet(other, "toy", "1" * 64, {}, {}, provenance={"salt": 3}).write_manifest()
        await refused(bench, 3, StoreError, "other weights")


@asynchronous
async def test_a_set_of_another_digest_than_the_config_names_is_refused(store: Path) -> None:
    async with serving(store) as bench:
        change = Change(parameters=replace(bench.set_of(2), sha256="f" * 64))
        with pytest.raises(FailedPreconditionError, match=r"has the SHA-256 [0-9a-f]{64}, not ffff"):
            await bench.manager.apply(change, "test", dry_run=False, wait=True)
        assert bench.generation == 1


@asynchronous
async def test_a_later_swap_overtakes_the_one_that_is_being_built(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.gate.clear()
        slow = asyncio.create_task(bench.apply(2))
        await bench.until("mode.preparing", generation=2)
        last = asyncio.create_task(bench.apply(3))
        await asyncio.sleep(0)  # for it to be entered
        bench.engine.gate.set()
        with pytest.raises(FailedPreconditionError, match="overtaken by a later change"):
            await slow
        assert (await last).to_generation == 3
        assert await bench.generations_of_an_answer() == {3}


@asynchronous
async def test_a_set_that_was_overtaken_can_be_applied_again(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.gate.clear()
        first = asyncio.create_task(bench.apply(2))
        await bench.until("mode.preparing", generation=2)
        changes = [asyncio.create_task(bench.apply(salt)) for salt in (3, 2)]
        await asyncio.sleep(0)
        bench.engine.gate.set()
        outcomes = await asyncio.gather(first, *changes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[:2]] == [FailedPreconditionError] * 2
        assert isinstance(outcomes[2], ChangeReport)
        assert bench.manager.snapshot().parameter_set == outcomes[2].parameter_set
        await bench.apply(2)
        assert not (await bench.apply(2)).changed


@asynchronous
async def test_a_commit_leaves_the_set_of_a_later_change_alone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets are kept and forgotten in one thread: none comes in while it is found out which are needed."""
    writing, durable, threads = threading.Event(), threading.Event(), set()
    write, keep, forget = Committed.write, SetDepot.keep, SetDepot.forget_all_but

    def held(self: Committed, path: Path) -> None:
        writing.set()
        assert durable.wait(20)
        write(self, path)

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            threads.add(threading.get_ident())
            return call(*arguments)

        return noting

    async with serving(store, keep_generations=1) as bench:
        monkeypatch.setattr(Committed, "write", held)
        monkeypatch.setattr(SetDepot, "keep", noted(keep))
        monkeypatch.setattr(SetDepot, "forget_all_but", noted(forget))
        first = asyncio.create_task(bench.apply(2))
        assert await asyncio.to_thread(writing.wait, 20)
        bench.engine.gate.clear()
        second = asyncio.create_task(bench.apply(3))
        await bench.until("mode.preparing", generation=3)
        durable.set()
        await first
        bench.engine.gate.set()
        committed = (await second).parameter_set
    assert len(threads) == 1
    assert [path.name for path in (state_dir(store) / "sets").iterdir()] == [committed]


@asynchronous
async def test_a_switch_takes_effect_at_once_while_a_set_is_being_built(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.gate.clear()
        swap = asyncio.create_task(bench.apply(2))
        await bench.until("mode.preparing", generation=2)
        await bench.manager.switch(INT8, InFlight.MIGRATE, "test", wait=True)
        assert {(token.generation, token.mode) for token in await bench.answer()} == {(1, INT8)}
        bench.engine.gate.set()
        assert (await swap).to_mode is INT8
        assert {(token.generation, token.mode) for token in await bench.answer()} == {(2, INT8)}


@asynchronous
async def test_a_dry_run_changes_nothing_and_overtakes_nothing(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.gate.clear()
        swap = asyncio.create_task(bench.apply(2))
        await bench.until("mode.preparing", generation=2)
        tried = await bench.apply(3, dry_run=True)
        assert (tried.changed, tried.done, tried.from_generation) == (True, False, 1)
        bench.engine.gate.set()
        assert (await swap).to_generation == 2
        assert len(bench.engine.graphs) == 2
        assert not (await bench.apply(2, dry_run=True)).changed
        assert [entry.generation for entry in bench.history.newest("m", 10)] == [2]


@asynchronous
async def test_without_waiting_a_swap_is_answered_when_it_is_validated(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.gate.clear()
        report = await bench.apply(2, wait=False)
        assert (report.changed, report.done, report.to_generation) == (True, False, 2)
        bench.engine.gate.set()
        await bench.until("apply.committed", generation=2)
        (bench.set_of(3).path or Path()).joinpath(MANIFEST_NAME).unlink()
        with pytest.raises(StoreError):
            await bench.apply(3, wait=False)


# Rollback


@asynchronous
async def test_a_rollback_to_a_generation_in_memory_builds_nothing(store: Path) -> None:
    async with serving(store, keep_previous_s=NEVER) as bench:
        await bench.apply(2)
        built = len(bench.engine.graphs)
        report = await bench.rollback()
        assert (report.from_generation, report.to_generation) == (2, 1)
        assert len(bench.engine.graphs) == built
        assert await bench.generations_of_an_answer() == {1}
        assert (await bench.rollback()).to_generation == 2


@asynchronous
async def test_a_rollback_rebuilds_what_was_released(store: Path) -> None:
    async with serving(store) as bench:
        await bench.apply(2)
        await bench.apply(3)
        shutil.rmtree(bench.sets)
        await bench.until("mode.released", generation=2)
        report = await bench.rollback(2)
        assert (report.from_generation, report.to_generation) == (3, 2)
        assert await bench.generations_of_an_answer() == {2}
        (entry, *_) = bench.history.newest("m", 1)
        assert (entry.kind, entry.generation) == ("rollback", 2)


@asynchronous
async def test_a_rollback_needs_a_generation_to_return_to(store: Path) -> None:
    async with serving(store, keep_generations=2) as bench:
        with pytest.raises(FailedPreconditionError, match="no earlier generation"):
            await bench.rollback()
        await bench.apply(2)
        await bench.apply(3)
        with pytest.raises(InvalidArgumentError, match="generation: 1 is not kept; kept: 3, 2"):
            await bench.rollback(1)


@asynchronous
async def test_sets_of_forgotten_generations_leave_the_state_directory(store: Path) -> None:
    async with serving(store, keep_generations=2) as bench:
        for salt in (2, 3, 4):
            await bench.apply(salt)
        kept = {path.name for path in (state_dir(store) / "sets").iterdir()}
        assert kept == {state.parameter_set for state in bench.manager.snapshot().generations}


# Restarts


@asynchronous
async def test_the_committed_generation_comes_back_though_the_dropped_set_is_gone(store: Path) -> None:
    async with serving(store) as bench:
        await bench.apply(2)
        first = await bench.answer()
        shutil.rmtree(bench.sets)
    async with serving(store) as bench:
        assert await bench.answer() == first
        assert (await bench.apply(3)).to_generation == 3
        assert (await bench.rollback(1)).to_generation == 1


@asynchronous
async def test_a_damaged_set_gives_way_to_the_generation_before_and_that_is_told(store: Path) -> None:
    async with serving(store) as bench:
        await bench.apply(2)
        damaged = (await bench.apply(3)).parameter_set
    (state_dir(store) / "sets" / damaged / MANIFEST_NAME).write_text("{")
    with capture_logs() as lines:
        async with serving(store) as bench:
            assert await bench.generations_of_an_answer() == {2}
            (entry, recovered) = bench.history.newest("m", 10)
    assert (recovered.kind, recovered.generation) == ("apply", 3)
    assert (entry.kind, entry.outcome, entry.generation) == ("recover", "rejected", 3)
    assert entry.reason.startswith("committed generation lost")
    assert any(line["log_level"] == "error" and line.get("generation") == 3 for line in lines)


@asynchronous
async def test_the_entry_of_a_commit_that_a_crash_lost_is_added(store: Path, tmp_path: Path) -> None:
    async with serving(store, History(tmp_path / "history.jsonl")) as bench:
        await bench.apply(2)
        (entry,) = bench.history.newest("m", 10)
    (tmp_path / "history.jsonl").unlink()
    async with serving(store, History(tmp_path / "history.jsonl")) as bench:
        (recovered,) = bench.history.newest("m", 10)
        assert (recovered.id, recovered.kind, recovered.generation) == (entry.id, "apply", 2)


@asynchronous
async def test_another_configuration_is_another_generation_of_the_same_set(store: Path) -> None:
    async with serving(store) as bench:
        applied = await bench.apply(2)
    async with serving(store, activation_group=64) as bench:
        now = bench.manager.snapshot()
        assert (now.generation, now.parameter_set) == (3, applied.parameter_set)
        assert now.hash != applied.hash


@asynchronous
async def test_a_pin_holds_until_the_next_switch_and_over_a_restart(store: Path) -> None:
    async with serving(store) as bench:
        await bench.manager.switch(INT8, InFlight.MIGRATE, "test", wait=True, pin=True)
        assert bench.manager.noise(0).pin is INT8
        await bench.apply(2)
    async with serving(store) as bench:
        assert bench.manager.noise(0).pin is INT8
        await bench.manager.switch(INT8, InFlight.MIGRATE, "test", wait=True)
        assert bench.manager.noise(0).pin is None


@asynchronous
async def test_what_a_config_says_of_the_monitor_stays_until_it_is_taken_back(store: Path) -> None:
    async with serving(store) as bench:
        change = Change(monitor={"threshold": {"int4": 0.25}})
        assert (await bench.manager.apply(change, "test", dry_run=False, wait=True)).changed
        assert not (await bench.manager.apply(change, "test", dry_run=False, wait=True)).changed
        assert await bench.threshold() == 0.25
    async with serving(store) as bench:
        assert await bench.threshold() == 0.25
        await bench.manager.apply(Change(monitor={}), "test", dry_run=False, wait=True)
        assert await bench.threshold() is None


@asynchronous
async def test_what_could_not_be_found_again_is_not_committed(store: Path) -> None:
    """Somebody has removed the state directory, or another daemon has one in its place."""

    def refuse() -> None:
        raise FileNotFoundError("it is gone")

    async with serving(store) as bench:
        bench.manager._transitions._require_state_dir = refuse
        with pytest.raises(FailedPreconditionError, match="cannot be made durable: it is gone") as caught:
            await bench.apply(2)
        assert caught.value.subject == "state_dir"
        assert await bench.generations_of_an_answer() == {1}
        assert not (state_dir(store) / "state.json").exists()


# Where memory is for one generation only


@asynchronous
async def test_in_place_the_old_graphs_go_first_and_open_requests_wait(store: Path) -> None:
    async with serving(store, swap=SwapPolicy.RESOURCE) as bench:
        async with aclosing(bench.manager.generate(GenerationRequest("open", PROMPT, LONG))) as outputs:
            made = list((await anext(outputs)).tokens)
            await bench.apply(2)
            made += [token async for output in outputs for token in output.tokens]
        assert_right(made)
        assert {token.generation for token in made} == {1, 2}
        assert bench.engine.open_at_compile == [0, 0]


@asynchronous
async def test_in_place_new_requests_wait_for_what_comes_out_and_nothing_old_is_built(store: Path) -> None:
    """And the monitor, which then has nothing to measure with, says nothing."""
    async with serving(store, swap=SwapPolicy.RESOURCE, monitor=MonitorConfig()) as bench:
        bench.engine.gate.clear()
        swap = asyncio.create_task(bench.apply(2))
        await bench.until("mode.preparing", generation=2)
        answers = [asyncio.create_task(bench.generations_of_an_answer()) for _ in range(3)]
        await bench.manager._monitor.decide()
        bench.engine.gate.set()
        await swap
        assert await asyncio.gather(*answers) == [{2}] * 3
        assert sum(graph.modes <= QUANTIZED for graph in bench.engine.graphs) == 2


@asynchronous
async def test_in_place_a_refused_set_brings_the_old_graphs_back(store: Path) -> None:
    async with serving(store, swap=SwapPolicy.RESOURCE) as bench:
        async with aclosing(bench.manager.generate(GenerationRequest("open", PROMPT, LONG))) as outputs:
            made = list((await anext(outputs)).tokens)
            bench.engine.sharp_salts = frozenset({2})
            with pytest.raises(FailedPreconditionError, match="failed its proof"):
                await bench.apply(2)
            made += [token async for output in outputs for token in output.tokens]
        assert {token.generation for token in made} == {1}
        assert len(made) == LONG


@asynchronous
async def test_in_place_open_requests_cannot_finish_on_the_old_set(store: Path) -> None:
    async with serving(store, swap=SwapPolicy.RESOURCE) as bench:
        with pytest.raises(FailedPreconditionError, match="cannot finish on the old weights"):
            await bench.apply(2, in_flight=InFlight.FINISH)
        assert await bench.generations_of_an_answer() == {1}


@asynchronous
async def test_of_many_changes_at_once_the_last_ones_win(store: Path) -> None:
    """Sets, modes and rollbacks in any order: state file, snapshot and answers agree, and no answer is wrong."""
    async with serving(store, keep_generations=8) as bench:
        for salt in (2, 3, 4):
            await bench.apply(salt)
        chosen = random.Random(7)
        sets = [chosen.choice((2, 3, 4)) for _ in range(20)]
        modes = [chosen.choice((INT4, INT8)) for _ in range(20)]
        changes = [asyncio.create_task(bench.apply(salt, mode)) for salt, mode in zip(sets, modes, strict=True)]
        await asyncio.gather(*(bench.answer(precision, new=100) for precision in (None, None, INT8, FP32)))
        await asyncio.gather(*changes, return_exceptions=True)
        assert (await bench.apply(sets[-1])).to_generation == sets[-1]
        state = json.loads((state_dir(store) / "state.json").read_text())
        now = bench.manager.snapshot()
        assert (state["generation"], state["mode"]) == (now.generation, now.mode.value)
        assert {(token.generation, token.mode) for token in await bench.answer()} == {(sets[-1], modes[-1])}
