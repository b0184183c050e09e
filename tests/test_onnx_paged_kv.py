"""Moving a sequence between the paged cache of OpenVINO and the slots of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from golden_models import GOLDEN, PROMPT, golden_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from dskquant.convert import ConvertOptions, convert
from dskquant.engines import load_engine
from dskquant.engines.onnxruntime import ONNXRuntimeEngine
from dskquant.engines.onnxruntime.graph import ONNXRuntimeGraph
from dskquant.engines.onnxruntime.paged_kv import read_pages, write_pages
from dskquant.engines.onnxruntime.slots import SlotCache, SlotLayout, longest_slot
from dskquant.engines.openvino.graph import OpenVINOCache
from dskquant.engines.protocol import CompileOptions, Graph, SlotBatch, StepBatch
from dskquant.errors import EngineError
from dskquant.modes import PrecisionMode
from dskquant.scheme import Scheme

FP32 = PrecisionMode.FP32
BLOCK = 32
BLOCKS = np.array([3, 1], np.int32)  # of the sequence under test, of 4
TOKENS = (PROMPT * 2)[:50]
MOVED = 40  # tokens: a full block and part of another
HEADS, HEAD_DIM = 2, 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moving") / "store"
    options = ConvertOptions(scheme=Scheme(group_size=32), golden=False)
    convert(GOLDEN / "llama", directory, options, lambda stage, done, total: None)
    return directory


def paged_graph(store: Path, kv_precision: str) -> tuple[Graph, OpenVINOCache]:
    graph = load_engine("openvino").compile(store, {FP32}, CompileOptions(kv_precision=kv_precision))
    cache = graph.allocate_cache(4)
    assert isinstance(cache, OpenVINOCache)
    for tensor in cache.tensors.values():
        tensor.data[...] = 0
    graph.bind(cache)
    return graph, cache


def run_paged(graph: Graph, tokens: Sequence[int], past: int) -> np.ndarray:
    rows = np.arange(len(tokens), dtype=np.int32)
    blocks = BLOCKS[: -(-(past + len(tokens)) // BLOCK)]
    batch = StepBatch(
        token_ids=np.array(tokens, np.int64),
        positions=np.arange(past, past + len(tokens)),
        past_lens=np.array([past], np.int32),
        subsequence_begins=np.array([0, len(tokens)], np.int32),
        block_indices=blocks,
        block_indices_begins=np.array([0, len(blocks)], np.int32),
        residual_rows=rows[:0],
        logit_rows=rows,
    )
    return graph.run(batch).copy()


def run_slot(graph: ONNXRuntimeGraph, tokens: Sequence[int], past: int) -> np.ndarray:
    rows = np.array([[0, index] for index in range(len(tokens))])
    lengths = np.array([past], np.int32), np.array([len(tokens)], np.int32)
    return graph.run(SlotBatch(1, np.array([tokens]), *lengths, rows[:0], rows)).copy()


def slot_graph(store: Path) -> tuple[ONNXRuntimeGraph, SlotCache]:
    graph = ONNXRuntimeEngine().compile(store, {FP32}, CompileOptions())
    cache = graph.allocate_cache(2)
    graph.bind(cache)
    return graph, cache


@pytest.fixture(scope="module")
def never_moved(store: Path) -> np.ndarray:
    """The logits of a sequence that stays where it is, in float32."""
    logits = run_paged(paged_graph(store, "f32")[0], TOKENS, 0)
    assert np.abs(logits[: len(PROMPT)] - golden_logits("llama")).max() <= 1e-3
    return logits


def test_a_float_sequence_goes_on_in_a_slot_as_if_never_moved(store: Path, never_moved: np.ndarray) -> None:
    (paged, blocks), (graph, slots) = paged_graph(store, "f32"), slot_graph(store)
    run_paged(paged, TOKENS[:MOVED], 0)
    slots.load(1, blocks, BLOCKS, 0, MOVED)
    assert np.abs(run_slot(graph, TOKENS[MOVED:], MOVED) - never_moved[MOVED:]).max() <= 1e-3


def test_a_float_sequence_goes_on_in_pages_as_if_never_moved(store: Path, never_moved: np.ndarray) -> None:
    (paged, blocks), (graph, slots) = paged_graph(store, "f32"), slot_graph(store)
    run_slot(graph, TOKENS[:MOVED], 0)
    slots.store(1, blocks, BLOCKS, 0, MOVED)
    assert np.abs(run_paged(paged, TOKENS[MOVED:], MOVED) - never_moved[MOVED:]).max() <= 1e-3


def test_the_engine_reads_8_bit_pages_as_it_would_its_own(store: Path, never_moved: np.ndarray) -> None:
    """Pages that were written here lose no more than pages that the engine wrote, and it adds tokens to them."""
    (own, _), (paged, blocks) = paged_graph(store, "u8"), paged_graph(store, "u8")
    graph, slots = slot_graph(store)
    run_paged(own, TOKENS[:MOVED], 0)
    noise = np.abs(run_paged(own, TOKENS[MOVED:], MOVED) - never_moved[MOVED:]).max()
    run_slot(graph, TOKENS[:MOVED], 0)
    slots.store(1, blocks, BLOCKS, 0, MOVED)
    moved_noise = np.abs(run_paged(paged, TOKENS[MOVED:], MOVED) - never_moved[MOVED:]).max()
    assert 0 < moved_noise <= 1.5 * noise


def test_8_bit_pages_of_the_engine_are_read_to_half_a_step(store: Path) -> None:
    """Against the float cache of the same sequence, layer 0, whose keys and values no quantization has touched yet."""
    (paged, blocks), (graph, slots) = paged_graph(store, "u8"), slot_graph(store)
    run_paged(paged, TOKENS[:MOVED], 0)
    run_slot(graph, TOKENS[:MOVED], 0)
    for exact, found in ((slots.keys[0], blocks.key_pages[0]), (slots.values[0], blocks.value_pages[0])):
        read = np.zeros_like(exact[0])
        read_pages(found, BLOCKS, MOVED, read)
        step = np.ptp(exact[1, :, :MOVED]) / 255
        assert np.abs(read[:, :MOVED] - exact[1, :, :MOVED]).max() <= 0.51 * step


def test_slots_are_as_long_as_memory_allows_and_the_context_at_most(store: Path) -> None:
    engine, layout = ONNXRuntimeEngine(), SlotLayout(2, 2, 16, 128)
    assert engine.allocate_cache(store, 4, 1 << 30).longest == layout.context_length
    wide = SlotLayout(num_layers=16, kv_heads=8, head_dim=128, context_length=4096)
    assert longest_slot(wide, 8, 1 << 30) == 1024  # 16 layers * 2 * 8 heads * 128 * 4 bytes are 2**17 a token
    with pytest.raises(EngineError, match="8 KV slots need 256 MiB at least; 128 MiB are allowed"):
        longest_slot(wide, 8, 128 << 20)


def test_pages_of_a_type_that_numpy_lacks_are_not_taken_for_another_one() -> None:
    cache = OpenVINOCache({"key_cache.0": (ov.Type.bf16, [2, 32, 16]), "value_cache.0": (ov.Type.bf16, [2, 32, 16])}, 1)
    with pytest.raises(EngineError, match="bf16"):
        _ = cache.key_pages


SHAPES = {
    "float": ((BLOCK, HEAD_DIM), np.float32),
    "by token": ((BLOCK, 8 + HEAD_DIM), np.uint8),
    "by channel": ((8 + BLOCK, HEAD_DIM), np.uint8),
}


@settings(deadline=None)
@given(
    kind=st.sampled_from(list(SHAPES)),
    length=st.integers(1, 4 * BLOCK),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
)
def test_what_is_written_is_read_back(kind: str, length: int, seed: int, spread: float) -> None:
    """Exactly in floats; to half a step of the range of a token or channel in 8 bit; other blocks are left alone."""
    rng = np.random.default_rng(seed)
    (rows, width), dtype = SHAPES[kind]
    blocks = rng.permutation(7)[: -(-length // BLOCK)].astype(np.int32)
    cache = rng.integers(1, 100, (7, HEADS, rows, width)).astype(dtype)
    before = cache.copy()
    slot = (rng.normal(size=(HEADS, 4 * BLOCK, HEAD_DIM)) * spread + spread).astype(np.float32)
    write_pages(slot, length, cache, blocks)
    read = np.zeros_like(slot)
    read_pages(cache, blocks, length, read)
    tolerance = 0.0 if kind == "float" else float(np.ptp(slot[:, :length])) / 255 * 0.51 + 1e-6
    assert np.abs(read[:, :length] - slot[:, :length]).max() <= tolerance
    assert not read[:, length:].any()
    untouched = np.setdiff1d(np.arange(7), blocks)
    np.testing.assert_array_equal(cache[untouched], before[untouched])
