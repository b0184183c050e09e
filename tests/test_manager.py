"""The QuantizerManager on a toy engine: a change takes effect whole or not at all, and never costs a request."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from structlog.testing import capture_logs
from tests.fake_host import MANIFEST, asynchronous, tiny_codec
from tests.fakes import FakeGraph, assert_right_answer

from dskd import memory, state_lock
from dskd.config import ModelConfig, ProofConfig, SchedulerConfig
from dskd.engine.request import GenerationRequest, InFlight, MadeToken, StepOutput
from dskd.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from dskd.listen import StartupError
from dskd.manager.events import Event, EventBus, Subscription
from dskd.manager.history import History
from dskd.manager.manager import QuantizerManager
from dskd.manager.proof import Prover
from dskd.manager.state_file import Committed
from dskd.manager.types import SwitchReport
from dskd.monitor.config import MonitorConfig
from dskd.units import ByteSize
from dskquant import golden
from dskquant.divergence import Divergence
from dskquant.engines.protocol import CompileOptions, KVCache, Logits, StepBatch, WeightSource
from dskquant.errors import StoreError
from dskquant.modes import LADDER, PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.store import DEFAULT_PARAMETER_SET, GOLDEN, IR_BIN, TOKENIZER, file_sha256

INT4, INT8, FP16, FP32 = LADDER
MIGRATE, FINISH = InFlight.MIGRATE, InFlight.FINISH
PROMPT = (1, 2, 3)
WEIGHTS = "0" * 64
"""What a store says is the digest of its weights."""
LONG_AGO, NEVER = 0.0, 1e6
"""Seconds an unused mode is kept."""

UNMEASURED = MonitorConfig(share=0.0)
"""No two modes of the toy model ever agree, which is nothing to act upon."""

TOY_PROOF = ProofConfig(max_kl=20.0, min_agreement=0.0)
"""Modes of the toy model differ by a few nats."""


class ToyGraph(FakeGraph):
    """`sharpness` multiplies its logits: a large one puts it far away from every reference."""

    sharpness = 1.0
    largest_cache = 1_000_000  # blocks

    def bind(self, cache: KVCache) -> None:
        if cache.num_blocks > self.largest_cache:
            raise MemoryError
        super().bind(cache)

    def run(self, batch: StepBatch) -> Logits:
        return super().run(batch) * self.sharpness


@dataclass
class ToyEngine:
    """Makes toy graphs and keeps them; what is set here becomes of the graphs made from now on."""

    name: str = "toy"
    block_size: int = 4
    graphs: list[ToyGraph] = field(default_factory=list)
    error: Exception | None = None
    poison: int | None = None
    sharpness: float = 1.0
    needed_bytes: int = 0
    largest_cache: int = ToyGraph.largest_cache
    on_run: Callable[[StepBatch], None] = lambda batch: None
    gate: threading.Event = field(default_factory=threading.Event)  # what a compilation waits for
    at_gate: threading.Event = field(default_factory=threading.Event)  # whether one has come there

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
        self.at_gate.set()
        assert self.gate.wait(20), "nobody opened the gate"
        if self.error:
            raise self.error
        graph = ToyGraph(modes, poison=self.poison)
        graph.sharpness, graph.largest_cache, graph.on_run = self.sharpness, self.largest_cache, self.on_run
        self.graphs.append(graph)
        return graph

    def estimate_bytes(self, store: Path, modes: Collection[PrecisionMode], options: CompileOptions) -> int:
        return self.needed_bytes

    def of(self, mode: PrecisionMode) -> list[ToyGraph]:
        """The graphs made for `mode`, in order."""
        return [graph for graph in self.graphs if mode in graph.modes]


@dataclass
class Bench:
    """A manager that serves, and what it tells."""

    manager: QuantizerManager
    engine: ToyEngine
    events: Subscription
    history: History
    state_file: Path
    is_closed: bool = False

    @property
    def mode(self) -> PrecisionMode:
        return self.manager.snapshot().mode

    @property
    def residents(self) -> set[PrecisionMode]:
        return {state.mode for state in self.manager.snapshot().modes if state.resident}

    async def switch(self, mode: PrecisionMode, in_flight: InFlight = MIGRATE, wait: bool = True) -> SwitchReport:
        return await self.manager.switch(mode, in_flight, "test", wait)

    async def close(self, grace_s: float) -> int:
        aborted = await self.manager.close(grace_s)
        self.is_closed = True
        return aborted

    async def answer(self, precision: PrecisionMode | None = None, new: int = 6) -> list[MadeToken]:
        """A whole answer, whose every token is the right one for its label."""
        request = GenerationRequest(f"{random.random()}", PROMPT, new, precision=precision)
        made = [token async for output in self.manager.generate(request) for token in output.tokens]
        assert len(made) == new
        assert_right_answer(PROMPT, made)
        return made

    async def modes_of_an_answer(self, precision: PrecisionMode | None = None) -> set[PrecisionMode]:
        return {token.mode for token in await self.answer(precision)}

    async def until(self, kind: str, **fields: str) -> Event:
        """Waits for an event of this kind with these fields."""
        async for event in self.events:
            if event.kind == kind and fields.items() <= event.fields.items():
                return event
        raise AssertionError(f"no {kind}")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """What a manager reads of a store: a manifest, a tokenizer for the golden prompts, and a parameter set."""
    folder = tmp_path / "store"
    parameters = folder / DEFAULT_PARAMETER_SET
    parameters.mkdir(parents=True)
    tiny_codec(folder)
    (folder / IR_BIN).touch()
    replace(MANIFEST, sha256={IR_BIN: WEIGHTS, TOKENIZER: file_sha256(folder / TOKENIZER)}).write(folder)
    ParameterSet(parameters, "toy", WEIGHTS, {}, {}).write_manifest()
    return folder


def new_manager(store: Path, engine: ToyEngine, events: EventBus, history: History, **config: Any) -> QuantizerManager:
    model = ModelConfig(
        store, **{"kv_cache_bytes": ByteSize(1 << 20), "proof": TOY_PROOF, "monitor": UNMEASURED, **config}
    )
    return QuantizerManager("m", model, SchedulerConfig(), engine, state_file_of(store).parent, events, history)


def state_file_of(store: Path) -> Path:
    return store.parent / "state" / "state.json"


@asynccontextmanager
async def serving(store: Path, **config: Any) -> AsyncIterator[Bench]:
    """A manager over the store that has been started; it is closed at the end."""
    engine, events, history = ToyEngine(), EventBus(), History()
    manager = new_manager(store, engine, events, history, **config)
    await manager.start()
    with events.subscribe() as subscription:
        bench = Bench(manager, engine, subscription, history, state_file_of(store))
        try:
            yield bench
        finally:
            engine.gate.set()
            if not bench.is_closed:
                await bench.close(0)
    assert all(graph.is_closed for graph in engine.graphs)


# Switches


@asynchronous
async def test_a_switch_to_a_resident_mode_builds_nothing(store: Path) -> None:
    async with serving(store) as bench:
        built = len(bench.engine.graphs)
        report = await bench.switch(INT8)
        assert (report.from_mode, report.to_mode, report.resident, report.done) == (INT4, INT8, True, True)
        assert report.prepare_ms == 0
        assert report.flip_us > 0
        assert len(bench.engine.graphs) == built
        assert await bench.modes_of_an_answer() == {INT8}


@asynchronous
async def test_the_old_mode_serves_on_while_the_new_one_is_built(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.gate.clear()
        switch = asyncio.create_task(bench.switch(FP32))
        await bench.until("mode.preparing", mode="fp32")
        assert bench.manager.snapshot().change_in_progress == "preparing fp32"
        assert await bench.modes_of_an_answer() == {INT4}
        bench.engine.gate.set()
        report = await switch
        assert (report.resident, report.done) == (False, True)
        assert 0 < report.prepare_ms <= report.total_ms
        assert bench.manager.snapshot().change_in_progress == ""
        assert await bench.modes_of_an_answer() == {FP32}
        (entry,) = bench.history.newest("m", 10)
        assert set(entry.phases_ms) == {"validate", "build", "prove", "commit"}


@asynchronous
async def test_graphs_are_made_and_asked_on_cores_that_nobody_else_wants(store: Path) -> None:
    """While something serves: the threads that an engine starts for the first graphs are those it will serve with."""
    policies: list[int] = []
    async with serving(store) as bench:
        bench.engine.on_run = lambda batch: policies.append(os.sched_getscheduler(0))
        await bench.switch(FP32)
        bench.engine.graphs[-1].on_run = lambda batch: policies.append(-1)
        await bench.answer(new=2)
    assert policies == [os.SCHED_IDLE, -1, -1]


@asynchronous
async def test_a_switch_that_nobody_waits_for_tells_its_end_by_an_event(store: Path) -> None:
    async with serving(store) as bench:
        report = await bench.switch(FP16, wait=False)
        assert (report.from_mode, report.to_mode, report.resident, report.done) == (INT4, FP16, False, False)
        await bench.until("switch.committed", **{"from": "int4", "to": "fp16"})
        assert bench.mode is FP16


@asynchronous
async def test_a_switch_goes_on_when_its_caller_goes_away(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.gate.clear()
        caller = asyncio.create_task(bench.switch(FP32))
        await bench.until("mode.preparing", mode="fp32")
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        bench.engine.gate.set()
        await bench.until("switch.committed", to="fp32")
        assert await bench.modes_of_an_answer() == {FP32}


@asynchronous
async def test_a_switch_is_overtaken_by_a_later_one(store: Path) -> None:
    """What was asked for last is what serves, whichever is ready first."""
    async with serving(store) as bench:
        bench.engine.gate.clear()
        slow = asyncio.create_task(bench.switch(FP32))
        await bench.until("mode.preparing", mode="fp32")
        await bench.switch(INT8)
        bench.engine.gate.set()
        with pytest.raises(FailedPreconditionError, match="overtaken by a later switch to int8"):
            await slow
        assert await bench.modes_of_an_answer() == {INT8}
        newest, before = bench.history.newest("m", 10)
        assert (newest.to_mode, newest.outcome) == (FP32, "rejected")
        assert (before.to_mode, before.outcome) == (INT8, "committed")


@pytest.mark.parametrize("ttl_s", [LONG_AGO, NEVER])
@asynchronous
async def test_of_many_switches_at_once_the_last_one_wins(store: Path, ttl_s: float) -> None:
    """History, state file and answers agree; an answer that runs meanwhile gets every token right."""
    async with serving(store, on_demand_ttl_s=ttl_s) as bench:
        chosen = random.Random(4)
        wanted = [chosen.choice(LADDER) for _ in range(50)]
        switches = [asyncio.create_task(bench.switch(mode)) for mode in wanted]
        await asyncio.gather(*(bench.answer(precision, new=300) for precision in (None, None, *LADDER)))
        outcomes = await asyncio.gather(*switches, return_exceptions=True)
        committed = [outcome for outcome in outcomes if isinstance(outcome, SwitchReport)]
        refusals = [outcome for outcome in outcomes if not isinstance(outcome, SwitchReport)]
        assert all("overtaken" in str(refusal) for refusal in refusals)
        assert outcomes[-1] is committed[-1]
        assert bench.mode is wanted[-1]
        assert json.loads(bench.state_file.read_text())["mode"] == wanted[-1].value
        entries = [entry for entry in reversed(bench.history.newest("m", 100)) if entry.outcome == "committed"]
        assert [entry.from_mode for entry in entries] == [INT4, *(entry.to_mode for entry in entries[:-1])]
        assert len(entries) == len(committed)


@asynchronous
async def test_open_requests_finish_in_their_mode_where_that_is_wanted(store: Path) -> None:
    async with serving(store) as bench:
        request = GenerationRequest("open", PROMPT, 200)
        async with aclosing(bench.manager.generate(request)) as outputs:
            made = list((await anext(outputs)).tokens)
            await bench.switch(INT8, FINISH)
            assert await bench.modes_of_an_answer() == {INT8}
            made += [token async for output in outputs for token in output.tokens]
        assert {token.mode for token in made} == {INT4}
        assert_right_answer(PROMPT, made)


# What stands in the way of a switch leaves the old mode serving


async def refused(bench: Bench, mode: PrecisionMode, error: type[Exception], reason: str) -> None:
    """A switch to `mode` fails for `reason`, which history and events tell; the old mode serves on."""
    before, residents = bench.mode, bench.residents
    with pytest.raises(error, match=reason):
        await bench.switch(mode)
    event = await bench.until("switch.rejected", to=mode.value)
    (entry, *_) = bench.history.newest("m", 1)
    assert (entry.outcome, entry.from_mode, entry.to_mode) == ("rejected", before, mode)
    assert entry.reason in event.message
    assert bench.mode is before
    assert bench.residents == residents
    assert await bench.modes_of_an_answer() == {before}


@asynchronous
async def test_a_mode_that_answers_no_numbers_is_refused(store: Path) -> None:
    """The golden prompts have spaces in them, after which this graph computes NaN."""
    async with serving(store) as bench:
        bench.engine.poison = ord(" ")
        await refused(bench, FP32, FailedPreconditionError, "fp32 failed its proof: .* not finite")
        (graph,) = bench.engine.of(FP32)
        assert graph.is_closed
        bench.engine.poison = None
        await bench.switch(FP32)
        assert await bench.modes_of_an_answer() == {FP32}


@pytest.mark.parametrize("damaged", ["reference", "served"])
def test_a_distance_to_no_number_is_none(damaged: str) -> None:
    logits = {"reference": np.zeros((2, 3), np.float32), "served": np.zeros((2, 3), np.float32)}
    logits[damaged][1, 2] = np.nan
    assert not Divergence.between(**logits).finite


def test_figures_that_are_no_numbers_pass_no_limit(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Divergence(1, math.nan, math.nan, math.nan, finite=True)
    monkeypatch.setattr(Divergence, "between", lambda *_: figures)
    with pytest.raises(FailedPreconditionError, match="its mean KL to the reference is nan"):
        Prover(golden.read(store), ToyEngine(), TOY_PROOF).judge({FP32: np.zeros((1, 2), np.float32)})


def test_a_reference_that_is_no_number_is_refused(store: Path) -> None:
    positions = sum(min(golden.SCORED, len(prompt)) for prompt in golden.encode_prompts(store))
    save_file({golden.LOGITS: np.full((positions, 2), np.nan, np.float32)}, store / GOLDEN)
    with pytest.raises(StoreError, match="an answer of the reference is not finite"):
        golden.read(store)


@asynchronous
async def test_a_mode_too_far_from_the_reference_is_refused_with_the_figures(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.sharpness = 100.0
        reason = r"fp16 failed its proof: .* mean KL to the reference is \d+ nats \(limit 20\) and its top-1 agreement"
        await refused(bench, FP16, FailedPreconditionError, reason)


@asynchronous
async def test_a_mode_that_does_not_fit_into_memory_is_refused_with_the_numbers(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(store) as bench:
        monkeypatch.setattr(memory, "available_bytes", lambda root: 1000 << 20)
        bench.engine.needed_bytes = 1500 << 20
        numbers = "loading fp32 needs 1.5 GiB, available are 1000.0 MiB: 500.0 MiB too little"
        await refused(bench, FP32, ResourceExhaustedError, numbers)
        assert not bench.engine.of(FP32)


@asynchronous
async def test_a_store_that_cannot_be_compiled_is_refused(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.error = StoreError("openvino_model.bin is damaged")
        await refused(bench, FP32, StoreError, "openvino_model.bin is damaged")
        bench.engine.error = None
        await bench.switch(FP32)
        assert await bench.modes_of_an_answer() == {FP32}


@asynchronous
async def test_a_switch_that_cannot_be_made_durable_is_refused(store: Path) -> None:
    """The folder of the state is a file."""
    state_file_of(store).parent.write_text("no folder")
    async with serving(store) as bench:
        await refused(bench, INT8, FailedPreconditionError, "cannot be made durable")


@asynchronous
async def test_a_bug_in_the_engine_is_logged_and_told(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.error = RuntimeError("bug")
        with capture_logs() as lines, pytest.raises(RuntimeError, match="bug"):
            await bench.switch(FP32)
        assert [line["event"] for line in lines if line["log_level"] == "error"] == ["background work failed"]
        assert await bench.modes_of_an_answer() == {INT4}


# The committed mode


@asynchronous
async def test_the_committed_mode_comes_back_after_a_restart(store: Path) -> None:
    async with serving(store) as bench:
        await bench.switch(FP32)
    async with serving(store) as bench:
        assert bench.residents == {INT4, INT8, FP32}
        assert await bench.modes_of_an_answer() == {FP32}


@asynchronous
async def test_a_new_default_in_the_configuration_replaces_the_committed_mode(store: Path) -> None:
    async with serving(store) as bench:
        await bench.switch(FP32)
    async with serving(store, default_mode=INT8) as bench:
        assert bench.mode is INT8


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"null",
        b"[]",
        b"{}",
        b'"int8"',
        b"\xff",
        b'{"mode": "int5", "default_mode": "int4", "hash": ""}',
    ],
)
@asynchronous
async def test_a_damaged_state_file_is_told_and_replaced(store: Path, content: bytes) -> None:
    path = state_file_of(store)
    path.parent.mkdir()
    path.write_bytes(content)
    with capture_logs() as lines:
        async with serving(store) as bench:
            assert bench.mode is INT4
            await bench.switch(INT8)
    (error,) = (line for line in lines if line["log_level"] == "error")
    assert error["event"] == "committed state cannot be read"
    assert error["path"] == str(path)
    async with serving(store) as bench:
        assert bench.mode is INT8


@asynchronous
async def test_a_committed_mode_that_cannot_be_built_gives_way_to_the_default(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log and history tell why."""
    async with serving(store) as bench:
        await bench.switch(FP32)
    monkeypatch.setattr(ToyEngine, "estimate_bytes", lambda _, store, modes, options: 1 << 60 if FP32 in modes else 0)
    with capture_logs() as lines:
        async with serving(store) as bench:
            assert await bench.modes_of_an_answer() == {INT4}
            entry, _ = bench.history.newest("m", 10)
    (error,) = (line for line in lines if line["log_level"] == "error")
    assert error["event"] == "what was committed cannot serve"
    assert (entry.kind, entry.outcome, entry.to_mode, entry.actor) == ("recover", "rejected", FP32, "daemon")
    assert error["reason"] == entry.reason
    assert entry.reason.startswith("committed mode lost: starting in the default mode: loading fp32 needs")


def test_a_second_daemon_on_a_state_directory_is_refused(tmp_path: Path) -> None:
    state_lock.hold(tmp_path / "state")
    with pytest.raises(StartupError, match=r"another dskd uses \[server\] state_dir /.*; give each its own"):
        state_lock.hold(tmp_path / "state")


def test_a_state_directory_that_was_removed_or_replaced_is_refused(tmp_path: Path) -> None:
    """A second daemon may hold what is there now."""
    state_dir = tmp_path / "state"
    lock = state_lock.hold(state_dir)
    lock.require()
    shutil.rmtree(state_dir)
    with pytest.raises(FileNotFoundError, match="was removed or replaced"):
        lock.require()
    other = state_lock.hold(state_dir)
    other.require()
    with pytest.raises(FileNotFoundError, match="was removed or replaced"):
        lock.require()


def test_a_state_directory_that_cannot_be_used_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    with capture_logs() as lines:
        state_lock.hold(tmp_path / "state")
    assert [line["log_level"] for line in lines] == ["warning"]


# The store


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda store: (store / IR_BIN).unlink(), r"openvino_model\.bin: missing"),
        (lambda store: (store / TOKENIZER).write_text("{}"), r"tokenizer\.json: damaged"),
        (lambda store: MANIFEST.write(store), r"sha256 does not list openvino_model\.bin"),
        (lambda store: replace(MANIFEST, sha256={IR_BIN: "1" * 64}).write(store), "made for other weights"),
    ],
)
@asynchronous
async def test_a_damaged_store_is_refused(store: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(store)
    with pytest.raises(StoreError, match=reason):
        await new_manager(store, ToyEngine(), EventBus(), History()).start()


# Modes on demand


@asynchronous
async def test_a_request_brings_in_its_own_mode_for_itself_alone(store: Path) -> None:
    """Requests that come at once share one build; a client that goes away meanwhile stops nothing."""
    async with serving(store) as bench:
        bench.engine.gate.clear()
        requests = [asyncio.create_task(bench.modes_of_an_answer(FP32)) for _ in range(4)]
        await bench.until("mode.preparing", mode="fp32")
        requests.pop(0).cancel()
        bench.engine.gate.set()
        assert await asyncio.gather(*requests) == [{FP32}] * 3
        assert len(bench.engine.of(FP32)) == 1
        assert await bench.modes_of_an_answer() == {INT4}


@asynchronous
async def test_a_request_whose_mode_cannot_be_built_is_told_why(store: Path) -> None:
    async with serving(store) as bench:
        bench.engine.error = StoreError("damaged")
        with pytest.raises(StoreError, match="damaged"):
            await bench.answer(FP32)
        assert await bench.modes_of_an_answer() == {INT4}


@asynchronous
async def test_a_mode_on_demand_is_released_when_it_is_no_longer_used(store: Path) -> None:
    async with serving(store, on_demand_ttl_s=LONG_AGO) as bench:
        await bench.switch(FP32)
        await bench.switch(INT4)
        await bench.until("mode.released", mode="fp32")
        assert bench.residents == {INT4, INT8}
        assert bench.engine.of(FP32)[0].is_closed
        assert await bench.modes_of_an_answer(FP32) == {FP32}
        assert len(bench.engine.of(FP32)) == 2


@asynchronous
async def test_a_mode_in_use_is_not_released(store: Path) -> None:
    """While an answer is open in FP32, FP16, which nobody uses any more, is released."""
    async with serving(store, on_demand_ttl_s=LONG_AGO) as bench:
        request = GenerationRequest("open", PROMPT, 100_000, precision=FP32)
        async with aclosing(bench.manager.generate(request)) as outputs:
            await anext(outputs)
            await bench.answer(FP16)
            await bench.until("mode.released", mode="fp16")
            assert bench.residents == {INT4, INT8, FP32}
            await anext(outputs)
        await bench.until("mode.released", mode="fp32")


@asynchronous
async def test_a_mode_about_to_serve_is_not_released(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the switch to FP32 is being made durable, FP16, which nobody uses any more, is released."""
    durable, write = threading.Event(), Committed.write

    def write_late(state: Committed, path: Path) -> None:
        assert durable.wait(20)
        write(state, path)

    monkeypatch.setattr(Committed, "write", write_late)
    async with serving(store, on_demand_ttl_s=LONG_AGO) as bench:
        switch = asyncio.create_task(bench.switch(FP32))
        await bench.until("mode.resident", mode="fp32")
        await bench.answer(FP16)
        await bench.until("mode.released", mode="fp16")
        durable.set()
        assert (await switch).done
        assert await bench.modes_of_an_answer() == {FP32}


# The end


@pytest.mark.parametrize("change", [Bench.switch, Bench.answer])
@asynchronous
async def test_closing_while_a_mode_is_being_built_frees_it_too(
    store: Path, change: Callable[[Bench, PrecisionMode], Coroutine[Any, Any, object]]
) -> None:
    """The build, which nothing can stop, is waited for; who waits for it, for a switch or an answer, is told why."""
    async with serving(store) as bench:
        bench.engine.gate.clear()
        waiting = asyncio.create_task(change(bench, FP32))
        await bench.until("mode.preparing", mode="fp32")
        closing = asyncio.create_task(bench.close(0))
        await asyncio.sleep(0)  # for the closing to begin
        with pytest.raises(UnavailableError, match="being unloaded"):
            await bench.switch(INT8)
        bench.engine.gate.set()
        with pytest.raises(UnavailableError, match="being unloaded"):
            await waiting
        assert await closing == 0
        assert {entry.outcome for entry in bench.history.newest("m", 10)} == {"rejected"}
        assert not bench.state_file.exists()
        assert threads_of_the_manager() == []


@asynchronous
async def test_closing_can_be_hurried_by_closing_again(store: Path) -> None:
    """As a second signal does: the first close is cancelled while it waits for an open answer, or for a build."""
    async with serving(store) as bench:
        bench.engine.gate.clear()
        outputs = bench.manager.generate(GenerationRequest("open", PROMPT, 10_000))
        await anext(outputs)
        switch = asyncio.create_task(bench.switch(FP32))
        await bench.until("mode.preparing", mode="fp32")
        patient = asyncio.create_task(bench.close(NEVER))
        await asyncio.sleep(0)
        patient.cancel()
        hurried = asyncio.create_task(bench.close(0))
        with pytest.raises(UnavailableError, match="grace period"):
            await drained(outputs)
        hurried.cancel()
        last = asyncio.create_task(bench.close(0))
        bench.engine.gate.set()
        with pytest.raises(UnavailableError, match="being unloaded"):
            await switch
        assert await last == 1
        assert threads_of_the_manager() == []


def threads_of_the_manager() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("build-m", "step-loop-m"))]


@asynchronous
async def test_a_start_that_fails_leaves_nothing_behind(store: Path) -> None:
    engine = ToyEngine(error=StoreError("damaged"))
    with pytest.raises(StoreError, match="damaged"):
        await new_manager(store, engine, EventBus(), History()).start()
    assert threads_of_the_manager() == []


@asynchronous
async def test_a_start_that_is_given_up_leaves_nothing_behind(store: Path) -> None:
    """The build under way is waited for, and what it made is dropped."""
    engine = ToyEngine()
    engine.gate.clear()
    start = asyncio.create_task(new_manager(store, engine, EventBus(), History()).start())
    assert await asyncio.to_thread(engine.at_gate.wait, 20)
    start.cancel()
    engine.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert threads_of_the_manager() == []
    graph = weakref.ref(engine.graphs.pop())
    assert graph() is None


@asynchronous
async def test_a_start_that_fails_at_its_last_step_stops_the_loop(store: Path) -> None:
    """The graph takes the scratch cache of the proof and refuses the one it shall serve with."""
    engine = ToyEngine()
    engine.largest_cache = 100
    manager = new_manager(store, engine, EventBus(), History())
    with pytest.raises(MemoryError):
        await manager.start()
    assert threads_of_the_manager() == []
    assert all(graph.is_closed for graph in engine.graphs)


@asynchronous
async def test_a_cache_smaller_than_a_block_stops_the_start(store: Path) -> None:
    engine = ToyEngine()
    manager = new_manager(store, engine, EventBus(), History(), kv_cache_bytes=ByteSize(8))
    with pytest.raises(FailedPreconditionError, match="must be at least 32: one cache block"):
        await manager.start()
    assert threads_of_the_manager() == []
    assert all(graph.is_closed for graph in engine.graphs)


@asynchronous
async def test_answers_that_outlast_the_grace_period_are_told_so(store: Path) -> None:
    async with serving(store) as bench:
        request = GenerationRequest("open", PROMPT, 10_000)
        outputs = bench.manager.generate(request)
        await anext(outputs)
        closing = asyncio.create_task(bench.close(0))
        with pytest.raises(UnavailableError, match="grace period"):
            await drained(outputs)
        assert await closing == 1
        with pytest.raises(UnavailableError, match="being unloaded"):
            await bench.answer()


async def drained(outputs: AsyncGenerator[StepOutput, None]) -> None:
    """Reads to the end."""
    async for _ in outputs:
        pass
