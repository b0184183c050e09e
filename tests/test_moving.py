"""A stream that moves between OpenVINO and ONNX Runtime, on a tiny real model."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.fake_host import asynchronous
from tests.golden_models import GOLDEN, PROMPT

from dskd.config import EngineUse, ModelConfig, ProofConfig, SchedulerConfig
from dskd.engine.batching import build_batch, build_slot_batch
from dskd.engine.engine_choice import Situation
from dskd.engine.request import GenerationRequest, InFlight, MadeToken, StepOutput
from dskd.engine.sequence import Chunk
from dskd.engine.sequence import Sequence as EngineSequence
from dskd.engine.slot_decoder import SecondEngine
from dskd.engine.slots import SlotTable
from dskd.engine.step_loop import StepLoop
from dskd.engine.step_times import StepTimes
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.manager import QuantizerManager
from dskd.manager.types import Change
from dskd.monitor.config import MonitorConfig
from dskd.units import ByteSize
from dskquant.convert import ConvertOptions, convert
from dskquant.divergence import Divergence
from dskquant.engines import load_engine, load_slot_engine
from dskquant.engines.protocol import CompileOptions, Logits
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule, Scheme

INT4, INT8, FP16, FP32 = PrecisionMode
OPENVINO, ONNXRUNTIME = "openvino", "onnxruntime"
EXACT = CompileOptions(kv_precision="f32", activation_group=0)
EVERY = 4  # steps between two moves
NEW = 90  # tokens, 20 moves and more

Choice = Callable[[Situation], bool]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moving") / "store"
    options = ConvertOptions(scheme=Scheme(group_size=32), golden=False)
    convert(GOLDEN / "llama", directory, options, lambda stage, done, total: None)
    return directory


def answers(store: Path, mode: PrecisionMode, choice: Choice | None, streams: int = 1) -> list[list[MadeToken]]:
    """What each of `streams` different prompts is answered; all of them begin with two blocks that they share."""
    engine, slot_engine = load_engine(OPENVINO), load_slot_engine(ONNXRUNTIME)
    graph = engine.compile(store, EXACT.graph_key(mode), EXACT)
    slot_graph = slot_engine.compile(store, EXACT.graph_key(mode), EXACT)
    cache, slots = graph.allocate_cache(32), slot_engine.allocate_cache(store, 8, 1 << 20)
    graph.bind(cache)
    slot_graph.bind(slots)
    made: dict[str, list[MadeToken]] = {f"r{index}": [] for index in range(streams)}

    def deliver(outputs: list[StepOutput]) -> None:
        for output in outputs:
            assert output.error is None
            made[output.request_id] += output.tokens

    loop = StepLoop(
        model="tiny",
        engine_name=OPENVINO,
        cache=cache,
        config=SchedulerConfig(),
        mode=mode,
        generation=1,
        deliver=deliver,
        second=SecondEngine(ONNXRUNTIME, slots, choice, StepTimes()) if choice else None,
    )
    loop.install(1, graph, slot_graph)
    for name in made:
        loop.submit(GenerationRequest(name, (*PROMPT[:-1], int(name[1:])), NEW))
    loop.apply_commands()
    while loop.snapshot().running + loop.snapshot().waiting:
        loop.run_one_step()
    loop.stop()
    graph.close()
    slot_graph.close()
    return list(made.values())


def to_and_fro(situation: Situation) -> bool:
    """Moves every few steps."""
    is_due = situation.steps >= EVERY - 1
    return situation.in_slots != is_due


@pytest.mark.parametrize("mode", [INT4, INT8, FP32])
def test_a_stream_that_moves_twenty_times_gives_the_text_of_one_that_never_moves(
    store: Path, mode: PrecisionMode
) -> None:
    (never,) = answers(store, mode, None)
    (moved,) = answers(store, mode, to_and_fro)
    assert [token.id for token in moved] == [token.id for token in never]
    engines = [token.engine for token in moved]
    assert sum(a != b for a, b in itertools.pairwise(engines)) >= 20
    assert {token.engine for token in never} == {OPENVINO}


def test_streams_that_move_together_each_give_their_own_text(store: Path) -> None:
    together = answers(store, INT4, to_and_fro, streams=3)
    assert [[token.id for token in made] for made in together] == [
        [token.id for token in made] for made in answers(store, INT4, None, streams=3)
    ]
    assert len({tuple(token.id for token in made) for made in together}) == 3


def logits_along(store: Path, tokens: Sequence[int], prompt: int, kv_precision: str, moves: bool) -> Logits:
    """FP32 logits [n, vocabulary] after each of `tokens` but the prompt's; `moves`: to and fro every `EVERY` tokens."""
    options = CompileOptions(kv_precision=kv_precision)
    graph = load_engine(OPENVINO).compile(store, {FP32}, options)
    slot_engine = load_slot_engine(ONNXRUNTIME)
    slot_graph = slot_engine.compile(store, {FP32}, options)
    cache, slots = graph.allocate_cache(8), slot_engine.allocate_cache(store, 2, 256 << 20)
    graph.bind(cache)
    slot_graph.bind(slots)
    table, sequence = SlotTable(slots, cache), EngineSequence(GenerationRequest("a", tuple(tokens[:prompt]), 1), FP32)
    sequence.blocks = np.arange(8, dtype=np.int32)
    graph.run(build_batch([Chunk(sequence, prompt)], cache.block_size))
    sequence.num_cached = prompt
    found = []
    for step, token in enumerate(tokens[prompt:]):
        sequence.tokens.append(token)
        if moves and step // EVERY % 2:
            first = table.gather([sequence])
            logits = slot_graph.run(build_slot_batch([Chunk(sequence, 1)], [table.slot_of(sequence)], first))
            table.note_run([sequence])
        else:
            table.update_blocks(sequence)
            logits = graph.run(build_batch([Chunk(sequence, 1)], cache.block_size))
        sequence.num_cached += 1
        found.append(logits[0].copy())
    graph.close()
    slot_graph.close()
    return np.array(found)


def test_a_stream_that_moves_loses_no_more_than_one_that_stays_in_8_bit_pages(store: Path) -> None:
    tokens = (PROMPT * 4)[:120]
    exact = logits_along(store, tokens, 40, "f32", moves=False)
    never, moved = (logits_along(store, tokens, 40, "u8", moves) for moves in (False, True))
    assert 0 < Divergence.between(exact, moved).mean_kl <= 1.5 * Divergence.between(exact, never).mean_kl


def test_on_a_real_model_20_moves_in_8_bit_pages_change_next_to_nothing(smollm2_store: Path) -> None:
    golden = np.load(GOLDEN / "smollm2.npz")
    prompt = golden["chat0"].tolist()
    tokens = [*prompt, *golden["answer0"].tolist(), *golden["answer1"].tolist()][: len(prompt) + 84]
    never, moved = (logits_along(smollm2_store, tokens, len(prompt), "u8", moves) for moves in (False, True))
    assert len(moved) // EVERY > 20
    assert 0 < Divergence.between(never, moved).mean_kl <= 1e-3


@asynccontextmanager
async def serving(store: Path, state: Path, use: EngineUse) -> AsyncIterator[QuantizerManager]:
    config = ModelConfig(
        store,
        engine=use,
        kv_precision="f32",
        activation_group=0,
        kv_cache_bytes=ByteSize(1 << 20),
        slot_bytes=ByteSize(1 << 20),
        proof=ProofConfig(max_kl=20.0, min_agreement=0.0),
        monitor=MonitorConfig(share=0.0),
    )
    slot_engine = None if use is EngineUse.OPENVINO else load_slot_engine(ONNXRUNTIME)
    engine, events, history = load_engine(OPENVINO), EventBus(), History()
    manager = QuantizerManager(
        "tiny", config, SchedulerConfig(), engine, state, events, history, slot_engine=slot_engine
    )
    await manager.start()
    try:
        yield manager
    finally:
        await manager.close(0)


async def ask(manager: QuantizerManager) -> list[MadeToken]:
    request = GenerationRequest("a", tuple(PROMPT), NEW)
    return [token async for output in manager.generate(request) for token in output.tokens]


@asynchronous
async def test_a_swap_and_a_switch_reach_both_engines(store: Path, tmp_path: Path) -> None:
    """Layers in another precision are another generation: what each engine makes of it is the same text."""
    finer = Change(layers=(LayerRule("*", INT8),))
    texts = []
    for use in (EngineUse.OPENVINO, EngineUse.ONNXRUNTIME):
        async with serving(store, tmp_path / use.value, use) as manager:
            before = await ask(manager)
            await manager.apply(finer, "test", dry_run=False, wait=True)
            await manager._residency.caught_up()
            after = await ask(manager)
            await manager.switch(FP32, InFlight.MIGRATE, "test", wait=True)
            await manager._residency.caught_up()
            exact = await ask(manager)
            made = (before, after, exact)
            assert [{token.engine for token in tokens[1:]} for tokens in made] == [{use.value}] * 3
            labels = [(tokens[-1].generation, tokens[-1].mode) for tokens in made]
            assert labels == [(1, INT4), (2, INT4), (2, FP32)]
            texts.append([[token.id for token in tokens] for tokens in made])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1] != texts[0][2]
