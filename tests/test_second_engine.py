"""A second engine under a QuantizerManager, on toy engines: it decodes where it can, and is never in the way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.fake_host import MANIFEST, asynchronous, tiny_codec
from tests.fakes import FakeSlotCache, FakeSlotGraph, assert_right_answer
from tests.test_manager import TOY_PROOF, UNMEASURED, ToyEngine

from dskd import memory
from dskd.config import EngineUse, ModelConfig, SchedulerConfig
from dskd.engine.request import GenerationRequest, InFlight, MadeToken
from dskd.engine.step_times import StepKind, StepTimes
from dskd.manager import measuring
from dskd.manager.events import EventBus
from dskd.manager.generation import Generation
from dskd.manager.history import History
from dskd.manager.manager import QuantizerManager
from dskd.manager.measuring import ROWS, STEPS, measure_slots
from dskd.manager.parts import Overtaking
from dskd.manager.proof import Prover
from dskd.manager.residency import Residency
from dskd.manager.second_engine import SLOTS, prepare
from dskd.manager.timings_file import TimingsFile, fingerprint, timings_file
from dskd.manager.types import SecondEngineState
from dskd.priority import at_once
from dskd.units import ByteSize
from dskquant import golden
from dskquant.engines.protocol import CompileOptions, Logits, SlotBatch
from dskquant.errors import EngineError
from dskquant.modes import LADDER, PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.store import DEFAULT_PARAMETER_SET, IR_BIN, TOKENIZER, file_sha256

INT4, INT8, FP16, FP32 = LADDER
PROMPT = (1, 2, 3)
WEIGHTS = "0" * 64


class ToySlotGraph(FakeSlotGraph):
    sharpness = 1.0

    def __init__(self, modes: Collection[PrecisionMode]) -> None:
        super().__init__(modes)
        self.closed = threading.Event()
        self.threads: list[str] = []  # of each run

    def close(self) -> None:
        super().close()
        self.closed.set()

    def run(self, batch: SlotBatch) -> Logits:
        self.threads.append(threading.current_thread().name)
        return super().run(batch) * self.sharpness


@dataclass
class ToySlotEngine:
    """Keeps the graphs it makes; what is set here becomes of those made from now on."""

    name: str = "slots"
    modes: frozenset[PrecisionMode] = frozenset(LADDER) - {FP16}
    graphs: list[ToySlotGraph] = field(default_factory=list)
    error: Exception | None = None
    sharpness: float = 1.0
    needed_bytes: int = 0
    on_compile: Callable[[], object] = lambda: None

    def compile(
        self,
        store: Path,
        modes: Collection[PrecisionMode],
        options: CompileOptions,
        parameters: ParameterSet | None = None,
    ) -> ToySlotGraph:
        self.on_compile()
        if self.error:
            raise self.error
        graph = ToySlotGraph(modes)
        graph.sharpness = self.sharpness
        self.graphs.append(graph)
        return graph

    def allocate_cache(self, store: Path, num_slots: int, max_bytes: int) -> FakeSlotCache:
        return FakeSlotCache(num_slots)

    def estimate_bytes(self, store: Path, modes: Collection[PrecisionMode], options: CompileOptions) -> int:
        return self.needed_bytes


@dataclass
class Bench:
    """A manager of two engines."""

    manager: QuantizerManager
    engine: ToyEngine
    slot_engine: ToySlotEngine

    @property
    def second(self) -> SecondEngineState:
        state = self.manager.snapshot().second
        assert state is not None
        return state

    @property
    def residency(self) -> Residency:
        return self.manager._residency

    def reason(self, mode: PrecisionMode) -> str:
        (graph,) = (graph for graph in self.second.graphs if graph.mode is mode)
        return graph.reason

    async def answer(self, name: str = "a", precision: PrecisionMode | None = None) -> list[MadeToken]:
        """Six tokens, each of which is the right one for its label."""
        request = GenerationRequest(name, PROMPT, 6, precision=precision)
        made = [token async for output in self.manager.generate(request) for token in output.tokens]
        assert len(made) == 6
        assert_right_answer(PROMPT, made)
        return made

    async def engines(self, precision: PrecisionMode | None = None) -> list[str]:
        return [token.engine for token in await self.answer(precision=precision)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """What a manager reads of a store."""
    folder = tmp_path / "store"
    parameters = folder / DEFAULT_PARAMETER_SET
    parameters.mkdir(parents=True)
    tiny_codec(folder)
    (folder / IR_BIN).touch()
    replace(MANIFEST, sha256={IR_BIN: WEIGHTS, TOKENIZER: file_sha256(folder / TOKENIZER)}).write(folder)
    ParameterSet(parameters, "toy", WEIGHTS, {}, {}).write_manifest()
    return folder


def state_dir(store: Path) -> Path:
    return store.parent / "state"


def timings_of(store: Path) -> TimingsFile:
    """The file that a manager of `store` with the default options reads."""
    return timings_file(state_dir(store), ModelConfig(store, threads=1), ("toy", "slots"))


@asynccontextmanager
async def serving(
    store: Path, use: EngineUse = EngineUse.ONNXRUNTIME, slot_engine: ToySlotEngine | None = None, **config: Any
) -> AsyncIterator[Bench]:
    """A manager over the store that has been started; it is closed at the end, and so are all its graphs."""
    engine, slot_engine = ToyEngine(), slot_engine or ToySlotEngine()
    model = ModelConfig(
        store,
        **{
            "engine": use,
            "kv_cache_bytes": ByteSize(1 << 20),
            "proof": TOY_PROOF,
            "monitor": UNMEASURED,
            "threads": 1,
            **config,
        },
    )
    manager = QuantizerManager(
        "m", model, SchedulerConfig(), engine, state_dir(store), EventBus(), History(), slot_engine=slot_engine
    )
    await manager.start()
    try:
        yield Bench(manager, engine, slot_engine)
    finally:
        await manager.close(0)
    assert all(graph.is_closed for graph in (*engine.graphs, *slot_engine.graphs))


@asynchronous
async def test_answers_are_decoded_by_the_second_engine_and_labelled_so(store: Path) -> None:
    async with serving(store) as bench:
        assert await bench.engines() == ["toy"] + ["slots"] * 5
        assert await bench.engines(INT8) == ["toy"] + ["slots"] * 5
        state = bench.second
        assert (state.name, state.use, state.reason, state.num_slots) == ("slots", EngineUse.ONNXRUNTIME, "", SLOTS)
        assert [(graph.mode, graph.bytes, graph.reason) for graph in state.graphs] == [(INT4, 500, ""), (INT8, 500, "")]
        memory_of_int4 = bench.manager.snapshot().modes[0].bytes
        assert memory_of_int4 == 1_000 + 500


@asynchronous
async def test_a_mode_on_demand_comes_to_both_engines_and_leaves_both(store: Path) -> None:
    async with serving(store, on_demand_ttl_s=0.0) as bench:
        bench.residency.want(FP32)
        await bench.answer(precision=FP32)
        await bench.residency.caught_up()
        assert await bench.engines(FP32) == ["toy"] + ["slots"] * 5
        bench.residency.want_no_longer(FP32)
        (graph,) = (graph for graph in bench.slot_engine.graphs if FP32 in graph.modes)
        assert await asyncio.to_thread(graph.closed.wait, 20)
        assert await bench.engines() == ["toy"] + ["slots"] * 5


@asynchronous
async def test_a_mode_that_it_lacks_is_served_by_the_first_engine_alone(store: Path) -> None:
    async with serving(store) as bench:
        assert await bench.engines(FP16) == ["toy"] * 6
        await bench.residency.caught_up()
        assert bench.reason(FP16) == "slots does not have it"


@asynchronous
async def test_a_second_copy_that_does_not_fit_is_not_made_and_the_numbers_are_told(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda root: 2000 << 20)
    with capture_logs():
        slot_engine = ToySlotEngine(needed_bytes=3000 << 20)
        async with serving(store, slot_engine=slot_engine, slot_bytes=ByteSize(1 << 30)) as bench:
            assert await bench.engines() == ["toy"] * 6
            assert "needs 2.9 GiB, available are 2.0 GiB" in bench.reason(INT4)
            assert bench.slot_engine.graphs == []


@asynchronous
async def test_slots_that_do_not_fit_leave_one_engine(store: Path) -> None:
    with capture_logs():
        async with serving(store, slot_bytes=ByteSize(1 << 50)) as bench:
            assert await bench.engines() == ["toy"] * 6
            assert "the KV slots of slots needs 1024.0 TiB" in bench.second.reason
            assert bench.second.num_slots == 0


@asynchronous
async def test_a_graph_that_fails_its_proof_decodes_nothing(store: Path) -> None:
    with capture_logs() as logs:
        async with serving(store, slot_engine=ToySlotEngine(sharpness=1000.0)) as bench:
            assert await bench.engines() == ["toy"] * 6
            assert "failed its proof" in bench.reason(INT4)
            assert [graph.is_closed for graph in bench.slot_engine.graphs] == [True]
    assert "the second engine does without" in [entry["event"] for entry in logs]


@asynchronous
async def test_a_mode_is_as_noisy_as_on_the_noisier_engine(store: Path) -> None:
    """Which the thresholds of the noise monitor follow from."""
    async with serving(store, EngineUse.OPENVINO) as bench:
        (alone,) = bench.manager.snapshot().generations
    async with serving(store, slot_engine=ToySlotEngine(sharpness=1.5)) as bench:
        (generation,) = bench.manager.snapshot().generations
        assert generation.kl[INT4] > alone.kl[INT4]
    async with serving(store, slot_engine=ToySlotEngine(sharpness=0.5)) as bench:
        (generation,) = bench.manager.snapshot().generations
        assert generation.kl[INT4] == alone.kl[INT4]


def test_fewer_rows_never_seem_to_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was held up is not taken for a slow one."""
    clock = iter([0.0, *np.cumsum([9.0, *[0.3] * 7, 9.0, *[0.5] * 7, 9.0, *[0.4] * 7, 9.0, *[0.8] * 7]).tolist()])
    now = [next(clock)]
    graph, times = ToySlotGraph({INT4}), StepTimes()
    graph.on_run = lambda batch: now.__setitem__(0, next(clock))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    measure_slots(graph, "slots", INT4, at_once, times)
    found = {kind.rows: seconds for kind, seconds in times.known.items()}
    assert found == pytest.approx({1: 0.3, 2: 0.4, 4: 0.4, 8: 0.8})


@asynchronous
async def test_a_graph_that_the_second_engine_cannot_make_is_done_without(store: Path) -> None:
    with capture_logs():
        async with serving(store, slot_engine=ToySlotEngine(error=EngineError("no such operator"))) as bench:
            assert await bench.engines() == ["toy"] * 6
            assert bench.reason(INT8) == "no such operator"


def test_a_build_that_is_overtaken_while_the_second_graph_is_made_leaves_none(store: Path) -> None:
    engine, slot_engine, overtaking = ToyEngine(), ToySlotEngine(), Overtaking()
    slot_engine.on_compile = lambda: overtaking.overtake("a later change")
    config = ModelConfig(store)
    prover = Prover(golden.read(store), engine, TOY_PROOF)
    second = prepare(config, slot_engine, engine, prover, state_dir(store))
    generation = Generation(1, "hash", ParameterSet(store, "toy", WEIGHTS, {}, {}))
    with capture_logs():
        slots = second.build(generation, frozenset({FP32}), at_once, at_once, overtaking.check)
    assert (slots.graph, slots.reason) == (None, "overtaken by a later change")
    assert [graph.is_closed for graph in slot_engine.graphs] == [True]


@asynchronous
async def test_a_change_does_not_wait_for_the_second_engine(store: Path) -> None:
    """The first one serves what is new, alone until the second one has it too."""
    async with serving(store) as bench:
        may_go_on = threading.Event()
        bench.slot_engine.on_compile = may_go_on.wait
        await bench.manager.switch(FP32, InFlight.MIGRATE, "test", wait=True)
        assert await bench.engines() == ["toy"] * 6
        assert bench.reason(FP32) == "it is being prepared"
        may_go_on.set()
        await bench.residency.caught_up()
        assert await bench.engines() == ["toy"] + ["slots"] * 5
        assert bench.reason(FP32) == ""


@asynchronous
async def test_a_second_graph_that_comes_too_late_is_closed(store: Path) -> None:
    async with serving(store, on_demand_ttl_s=0.0) as bench:
        may_go_on = threading.Event()
        bench.slot_engine.on_compile = may_go_on.wait
        with bench.manager._events.subscribe() as events:
            await bench.answer(precision=FP32)
            async for event in events:
                if event.kind == "mode.released":
                    break
        may_go_on.set()
        await bench.residency.caught_up()
        assert [graph.is_closed for graph in bench.slot_engine.graphs if FP32 in graph.modes] == [True]


@asynchronous
async def test_what_a_calibration_expects_grows_with_the_noise_of_the_second_engine(store: Path) -> None:
    async with serving(store, slot_engine=ToySlotEngine(sharpness=1.5)) as bench:
        generation, residency = bench.manager._transitions.serving.generation, bench.residency
        (resident,) = residency._residents.values()
        paged, slots = (
            {proof.mode: proof.divergence.mean_kl for proof in proofs}
            for proofs in (resident.proofs, resident.slots.proofs)
        )
        assert residency.second_noise(generation, INT4) == slots[INT4] / paged[INT4] > 1
        assert residency.second_noise(generation, FP32) == 1.0  # not in memory


def test_the_second_engine_never_stands_in_for_the_reference(store: Path) -> None:
    prover = Prover(golden.Golden(golden.read(store).prompts, None), ToyEngine(), TOY_PROOF)
    first, second = np.array([[1.0, 0.0]], np.float32), np.array([[0.0, 1.0]], np.float32)
    prover.judge({FP32: first})
    (unlike,) = prover.judge({FP32: second}, may_stand_in=False)
    (alike,) = prover.judge({INT4: first})
    assert unlike.divergence.mean_kl > alike.divergence.mean_kl == 0.0


@asynchronous
async def test_times_are_measured_once_for_auto(store: Path) -> None:
    async with serving(store, EngineUse.AUTO) as bench:
        measured = bench.second.step_seconds
        wanted = {StepKind(engine, mode, rows) for engine in ("toy", "slots") for mode in (INT4, INT8) for rows in ROWS}
        assert set(measured) == wanted
        assert all(seconds > 0 for seconds in measured.values())
        batches = len(bench.slot_engine.graphs[0].batches)
    assert timings_of(store).read() == measured  # nothing was served
    async with serving(store, EngineUse.AUTO) as bench:
        assert bench.second.step_seconds == measured
        assert len(bench.slot_engine.graphs[0].batches) < batches


@asynchronous
async def test_beside_a_loop_a_proof_waits_for_idle_cores_and_steps_are_timed_by_the_loop(store: Path) -> None:
    """Times of an idle thread would be those of the load at that moment."""
    async with serving(store, EngineUse.AUTO) as bench:
        await bench.answer(precision=FP32)
        await bench.residency.caught_up()
        (graph,) = (graph for graph in bench.slot_engine.graphs if FP32 in graph.modes)
        proof, *steps = graph.threads
        assert proof.startswith("when-idle")
        assert len(steps) >= len(ROWS) * STEPS
        assert set(steps) == {"step-loop-m"}


@asynchronous
async def test_nothing_is_measured_where_nothing_is_chosen(store: Path) -> None:
    async with serving(store) as bench:
        assert bench.second.step_seconds == {}


@pytest.mark.parametrize(("paged_s", "slots_s", "engine"), [(0.06, 0.03, "slots"), (0.03, 0.06, "toy")])
@asynchronous
async def test_auto_decodes_where_the_times_say(store: Path, paged_s: float, slots_s: float, engine: str) -> None:
    times = {
        StepKind(name, mode, rows): seconds
        for name, seconds in (("toy", paged_s), ("slots", slots_s))
        for mode in (INT4, INT8)
        for rows in ROWS
    }
    timings_of(store).write(times)
    async with serving(store, EngineUse.AUTO) as bench:
        assert bench.second.step_seconds == times
        assert await bench.engines() == ["toy"] + [engine] * 5
        learned = {kind for kind, seconds in bench.second.step_seconds.items() if seconds != times[kind]}
        assert learned == {StepKind(engine, INT4, 1)}
    assert timings_of(store).read()[StepKind(engine, INT4, 1)] < times[StepKind(engine, INT4, 1)]


def test_times_of_another_machine_or_engine_are_of_no_use(tmp_path: Path) -> None:
    path, times = tmp_path / "timings.json", {StepKind("toy", INT4, 1): 0.5}
    TimingsFile(path, "this").write(times)
    assert TimingsFile(path, "this").read() == times
    assert TimingsFile(path, "other").read() == {}


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"fingerprint": "this", "steps": [{"rows": "one"}]}'])
def test_damaged_times_are_measured_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "timings.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        assert TimingsFile(path, "this").read() == {}
    assert [entry["event"] for entry in logs] == ["step times cannot be read"]


def test_a_fingerprint_tells_machine_versions_and_options(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU @ 9 GHz\n")
    told = json.loads(fingerprint(["numpy", "toy"], ModelConfig(tmp_path, activation_group=64, threads=3), tmp_path))
    assert (told["cpu"], told["threads"], told["activation_group"]) == ("Fast CPU @ 9 GHz", 3, 64)
    assert (told["numpy"], told["toy"]) == (np.__version__, "")
