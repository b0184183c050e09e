"""ONNX graphs over KV slots: logits of transformers in FP32, those of the OpenVINO engine in INT4 and INT8."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN, PROMPT, TINY, golden_logits

from dskquant.convert import ConvertOptions, convert
from dskquant.engines import load_engine, onnxruntime
from dskquant.engines.onnxruntime import ONNXRuntimeEngine
from dskquant.engines.onnxruntime.graph import ONNXRuntimeGraph
from dskquant.engines.onnxruntime.ir_names import float_constants
from dskquant.engines.protocol import CompileOptions, SlotBatch, WeightLayout
from dskquant.errors import EngineError, StoreError
from dskquant.forward import forward
from dskquant.modes import PrecisionMode
from dskquant.scheme import Scheme
from dskquant.store import StoreManifest

INT4, INT8, FP16, FP32 = PrecisionMode
ENGINE = ONNXRuntimeEngine()
EXACT = CompileOptions(kv_precision="f32", activation_group=0)
SEPARATE = CompileOptions(kv_precision="f32", activation_group=0, weights=WeightLayout.SEPARATE)
FP32_TOLERANCE = 1e-3
ENGINES_TOLERANCE = 1e-2
SLOTS = 4


def quantized_store(name: str, directory: Path, **scheme: object) -> Path:
    options = ConvertOptions(scheme=Scheme(**{"group_size": 32, "int8_plane": True} | scheme), golden=False)
    convert(GOLDEN / name, directory, options, lambda stage, done, total: None)
    return directory


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    return {name: quantized_store(name, root / name) for name in TINY}


def graph_of(store: Path, mode: PrecisionMode, options: CompileOptions = EXACT) -> ONNXRuntimeGraph:
    graph = ENGINE.compile(store, options.graph_key(mode), options)
    graph.bind(graph.allocate_cache(SLOTS))
    return graph


def chunk(tokens: Sequence[int], past: int = 0, slot: int = 0, mode: PrecisionMode = FP32) -> SlotBatch:
    """New tokens of one slot; the logits of all of them are wanted."""
    rows = np.array([[0, index] for index in range(len(tokens))])
    return SlotBatch(
        first_slot=slot,
        token_ids=np.array([tokens]),
        past_lens=np.array([past], np.int32),
        new_lens=np.array([len(tokens)], np.int32),
        residual_rows=rows if mode is INT8 else rows[:0],
        logit_rows=rows,
    )


def decode(past_lens: Sequence[int], new_lens: Sequence[int], int8: Sequence[int] = ()) -> SlotBatch:
    """The next token of the prompt for each of the slots from the first on that has a new one."""
    count = len(past_lens)
    rows = np.array([[index, 0] for index in range(count)])
    return SlotBatch(
        first_slot=0,
        token_ids=np.array([[PROMPT[past]] for past in past_lens]),
        past_lens=np.array(past_lens, np.int32),
        new_lens=np.array(new_lens, np.int32),
        residual_rows=rows[list(int8)],
        logit_rows=rows[np.array(new_lens) > 0],
    )


def openvino_logits(store: Path, mode: PrecisionMode, options: CompileOptions) -> np.ndarray:
    engine = load_engine("openvino")
    graph = engine.compile(store, options.graph_key(mode), options)
    graph.bind(graph.allocate_cache(1))
    (logits,) = forward(graph, PROMPT, mode, block_size=engine.block_size)
    return logits.copy()


@pytest.mark.parametrize("name", TINY)
def test_prefill_gives_the_logits_of_transformers(stores: dict[str, Path], name: str) -> None:
    logits = graph_of(stores[name], FP32).run(chunk(PROMPT))
    assert np.abs(logits - golden_logits(name)).max() <= FP32_TOLERANCE


def test_the_norms_of_an_optimum_export_are_found_by_their_use(tmp_path: Path) -> None:
    """It keeps the names of matrices alone. (The angles are computed anew: the export has them in 16 bit.)"""
    store = quantized_store("llama_openvino", tmp_path / "store")
    logits = graph_of(store, FP32).run(chunk(PROMPT))
    assert np.abs(logits - golden_logits("llama")).max() <= FP32_TOLERANCE


@pytest.mark.parametrize("name", ["llama_tied_bias", "qwen2", "qwen3"])
def test_nameless_norms_and_biases_are_told_by_their_use(stores: dict[str, Path], name: str, tmp_path: Path) -> None:
    xml = stores[name] / "openvino_model.xml"
    named = float_constants(xml)
    nameless = tmp_path / "nameless.xml"
    nameless.write_text(re.sub(r'name="[^"]*(norm\.weight|\.bias)"', 'name="Constant"', xml.read_text()))
    assert 'norm.weight"' not in nameless.read_text()
    assert float_constants(nameless) == named


@pytest.mark.parametrize("name", TINY)
def test_a_chunk_and_single_tokens_give_the_same_logits(stores: dict[str, Path], name: str) -> None:
    graph = graph_of(stores[name], FP32)
    pieces = [graph.run(chunk(PROMPT[:20], slot=1)).copy()]
    pieces += [graph.run(chunk([token], past, slot=1)).copy() for past, token in enumerate(PROMPT) if past >= 20]
    assert np.abs(np.concatenate(pieces) - golden_logits(name)).max() <= FP32_TOLERANCE


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mode", [INT4, INT8])
def test_both_engines_agree_on_a_parameter_set(stores: dict[str, Path], name: str, mode: PrecisionMode) -> None:
    logits = graph_of(stores[name], mode).run(chunk(PROMPT, mode=mode))
    assert np.abs(logits - openvino_logits(stores[name], mode, EXACT)).max() <= ENGINES_TOLERANCE


@pytest.mark.parametrize("mode", [INT4, INT8])
def test_both_engines_agree_on_separate_weights(stores: dict[str, Path], mode: PrecisionMode) -> None:
    logits = graph_of(stores["llama"], mode, SEPARATE).run(chunk(PROMPT, mode=mode))
    assert np.abs(logits - openvino_logits(stores["llama"], mode, SEPARATE)).max() <= ENGINES_TOLERANCE


@pytest.mark.parametrize("options", [EXACT, SEPARATE])
def test_a_layer_that_always_uses_the_residual_does_so_in_int4(tmp_path: Path, options: CompileOptions) -> None:
    store = quantized_store("qwen2", tmp_path / "store", int8_layers=("*.q_proj.weight", "*.down_proj.weight"))
    logits = graph_of(store, INT4, options).run(chunk(PROMPT, mode=INT4))
    assert np.abs(logits - openvino_logits(store, INT4, options)).max() <= ENGINES_TOLERANCE


@pytest.mark.parametrize("scheme", [{"group_size": 0}, {"symmetric": True}])
def test_engines_agree_on_one_group_a_row_and_on_symmetric_groups(tmp_path: Path, scheme: dict[str, object]) -> None:
    store = quantized_store("llama", tmp_path / "store", **scheme)
    for mode in (INT4, INT8):
        logits = graph_of(store, mode).run(chunk(PROMPT, mode=mode))
        assert np.abs(logits - openvino_logits(store, mode, EXACT)).max() <= ENGINES_TOLERANCE


def test_int8_activations_change_little_and_something(stores: dict[str, Path]) -> None:
    """Dynamic quantization of activations is what `activation_group` asks for; 0 asks for none."""
    exact = graph_of(stores["llama"], INT8).run(chunk(PROMPT, mode=INT8)).copy()
    dynamic = graph_of(stores["llama"], INT8, CompileOptions()).run(chunk(PROMPT, mode=INT8))
    difference = np.abs(dynamic - exact)
    assert difference.max() > 1e-4
    assert difference.mean() < 0.1 * np.abs(exact).mean()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_slots_of_different_lengths_give_what_each_gives_alone(stores: dict[str, Path], name: str) -> None:
    """One slot of the batch sits the step out, and is not disturbed; an empty one may, too."""
    graph, golden = graph_of(stores[name], FP32), golden_logits(name)
    for slot, length in enumerate((10, 25, 17)):
        graph.run(chunk(PROMPT[:length], slot=slot))
    together = graph.run(decode([10, 25, 17, 0], [1, 0, 1, 0]))
    assert np.abs(together - golden[[10, 17]]).max() <= FP32_TOLERANCE
    again = graph.run(decode([11, 25, 18], [1, 1, 1]))
    assert np.abs(again - golden[[11, 25, 18]]).max() <= FP32_TOLERANCE


def test_each_slot_of_a_batch_has_a_precision_of_its_own(stores: dict[str, Path]) -> None:
    graph = graph_of(stores["llama"], INT4)
    lengths, modes = (10, 25, 17, 3), (INT8, INT4, INT4, INT8)
    alone = []
    for slot, (length, mode) in enumerate(zip(lengths, modes, strict=True)):
        graph.run(chunk(PROMPT[:length], slot=slot, mode=mode))
        alone.append(graph.run(chunk(PROMPT[length : length + 1], length, slot, mode))[0].copy())
    together = graph.run(decode(lengths, [1] * 4, int8=(0, 3))).copy()
    np.testing.assert_allclose(together, np.array(alone), atol=1e-4)
    all_int4 = graph.run(decode(lengths, [1] * 4))
    assert np.abs(all_int4[[0, 3]] - together[[0, 3]]).max() > 0.01


def test_a_chunk_may_want_no_logits(stores: dict[str, Path]) -> None:
    """As all but the last chunk of a long prompt do."""
    graph = graph_of(stores["llama"], INT4)
    batch = chunk(PROMPT, mode=INT8)
    nothing = SlotBatch(0, batch.token_ids, batch.past_lens, batch.new_lens, batch.residual_rows, batch.logit_rows[:0])
    assert graph.run(nothing).shape == (0, 256)


def test_what_one_graph_cached_another_continues(stores: dict[str, Path]) -> None:
    reference, graph = graph_of(stores["llama"], FP32), graph_of(stores["llama"], INT8)
    cache = reference.allocate_cache(1)
    reference.bind(cache)
    graph.bind(cache)
    graph.run(chunk(PROMPT[:16], mode=INT4))
    reference.run(chunk(PROMPT[:16]))  # over what INT4 wrote
    assert np.abs(reference.run(chunk(PROMPT[16:], 16)) - golden_logits("llama")[16:]).max() <= FP32_TOLERANCE


def test_a_growing_cache_keeps_its_tokens(tmp_path: Path) -> None:
    """From 256 tokens to 512, with the binding of a graph renewed."""
    store = quantized_store("llama_rope_linear", tmp_path / "store")
    config = store / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 128', '"max_position_embeddings": 640'))
    graph = graph_of(store, FP32)
    tokens = (PROMPT * 10)[:300]
    whole = graph.run(chunk(tokens, slot=1)).copy()
    cache = graph.allocate_cache(2)
    graph.bind(cache)
    assert cache.capacity == 256
    graph.run(chunk(tokens[:250]))
    rest = graph.run(chunk(tokens[250:], 250))
    assert cache.capacity == 512
    assert np.abs(rest - whole[250:]).max() <= FP32_TOLERANCE


def test_a_slot_is_never_longer_than_the_context(stores: dict[str, Path]) -> None:
    graph = graph_of(stores["llama"], FP32)
    with pytest.raises(EngineError, match="129 tokens is longer than the 128 it may have"):
        graph.run(chunk([1], past=128))


def test_a_copied_slot_is_continued_alike(stores: dict[str, Path]) -> None:
    graph = graph_of(stores["llama"], FP32)
    cache = graph.allocate_cache(3)
    graph.bind(cache)
    graph.run(chunk(PROMPT[:20], slot=2))
    cache.copy(source=2, target=0, length=20)
    assert np.abs(graph.run(chunk(PROMPT[20:], 20)) - golden_logits("llama")[20:]).max() <= FP32_TOLERANCE


def test_a_cache_of_another_model_is_refused(stores: dict[str, Path]) -> None:
    cache = graph_of(stores["mistral"], FP32).allocate_cache(1)
    with pytest.raises(EngineError, match="cannot be used by a graph of"):
        graph_of(stores["llama"], FP32).bind(cache)


def test_a_closed_graph_cannot_run(stores: dict[str, Path]) -> None:
    graph = graph_of(stores["llama"], FP32)
    graph.close()
    with pytest.raises(EngineError, match="closed"):
        graph.run(chunk(PROMPT))


def test_a_graph_built_in_the_background_serves_at_full_priority(stores: dict[str, Path]) -> None:
    """Threads inherit the niceness of the one that starts them, and cannot take it back."""
    before = niceness_of_threads()

    def build() -> dict[str, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        graph = ENGINE.compile(stores["llama"], {FP32}, CompileOptions(threads=3))
        started = niceness_of_threads()
        graph.close()
        return started

    with ThreadPoolExecutor(1) as background:
        during = background.submit(build).result()
    started = [niceness for thread, niceness in during.items() if thread not in before]
    assert sorted(started) == [0, 0, 5]  # two threads help the one that runs the graph


def niceness_of_threads() -> dict[str, int]:
    """proc(5): field 19 of /proc/self/task/TID/stat."""
    tasks = Path("/proc/self/task")
    return {task.name: int((task / "stat").read_text().rpartition(")")[2].split()[16]) for task in tasks.iterdir()}


def test_fp16_is_refused_with_what_to_do(stores: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="no 16-bit matrix product: serve fp16 with OpenVINO"):
        ENGINE.compile(stores["llama"], {FP16}, EXACT)


def test_modes_of_different_graphs_are_not_compiled_together(stores: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="no single graph serves"):
        ENGINE.compile(stores["llama"], {INT4, FP32}, EXACT)


def test_a_store_without_its_weights_is_refused(tmp_path: Path) -> None:
    store = quantized_store("llama", tmp_path / "store")
    (store / "openvino_model.bin").unlink()
    with pytest.raises(StoreError, match=r"openvino_model\.bin"):
        ENGINE.compile(store, {FP32}, EXACT)


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    store = quantized_store("llama", tmp_path / "store")
    weights = store / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StoreError, match=r"lm_head\.weight ends outside the file"):
        ENGINE.compile(store, {FP32}, EXACT)


def test_a_session_without_the_residual_plane_gives_the_same_bits(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores["llama_tied_bias"]
    lean = graph_of(store, INT4)
    monkeypatch.setattr(onnxruntime, "LEAN_BYTES", 0)
    alone = graph_of(store, INT4)
    assert lean.resident_bytes > alone.resident_bytes
    for batch in (chunk(PROMPT[:7], mode=INT4), chunk(PROMPT[:9], slot=1, mode=INT8), decode([7, 9], [1, 1], int8=[1])):
        assert np.array_equal(lean.run(batch), alone.run(batch))


@pytest.mark.parametrize("mode", [INT4, FP32])
def test_the_estimate_covers_what_is_resident(stores: dict[str, Path], mode: PrecisionMode) -> None:
    store = stores["llama"]
    graph = graph_of(store, mode)
    assert graph.resident_bytes >= StoreManifest.read(store).parameters // 2
    assert ENGINE.estimate_bytes(store, graph.modes, EXACT) >= graph.resident_bytes
