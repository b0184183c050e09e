"""Graphs made from a parameter set compute what its dequantized weights compute in FP32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN, PROMPT
from safetensors.numpy import load_file, save_file

from dskquant.convert import ConvertOptions, convert
from dskquant.engines import load_engine
from dskquant.engines.protocol import CompileOptions, Graph, StepBatch, WeightLayout
from dskquant.errors import EngineError, StoreError
from dskquant.forward import blocks_for, forward, forward_together
from dskquant.modes import PrecisionMode
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, StoreManifest

INT4, INT8, FP16, FP32 = PrecisionMode
ENGINE = load_engine("openvino")
EXACT = CompileOptions(kv_precision="f32", activation_group=0)
SEPARATE = CompileOptions(kv_precision="f32", activation_group=0, weights=WeightLayout.SEPARATE)
BLOCKS = 8
ALWAYS_INT8 = "*.down_proj.weight"


def no_progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def quantized_store(name: str, directory: Path, **scheme: object) -> Path:
    options = ConvertOptions(scheme=Scheme(group_size=32, int8_plane=True, **scheme))
    convert(GOLDEN / name, directory, options, no_progress)
    return directory


def dequantized_source(store: Path, name: str, planes: tuple[str, ...], directory: Path) -> Path:
    """The Hugging Face model `name` with every quantized weight replaced by the sum of its dequantized `planes`."""
    shutil.copytree(GOLDEN / name, directory)
    shards = {path: load_file(path) for path in directory.glob("*.safetensors")}
    tensors = load_file(store / DEFAULT_PARAMETER_SET / "planes-00001.safetensors")
    schemes = json.loads((store / DEFAULT_PARAMETER_SET / "manifest.json").read_text())["tensors"]
    for path, shard in shards.items():
        for weight in shard.keys() & schemes.keys():
            shard[weight] = sum_of_planes(tensors, weight, schemes[weight], planes).astype(np.float32)
        save_file({weight: values.astype(np.float32) for weight, values in shard.items()}, path)
    return directory


def sum_of_planes(tensors: dict, weight: str, scheme: dict, planes: tuple[str, ...]) -> np.ndarray:
    """(code - zero-point) * scale in float64, from the bytes of the file."""
    if scheme["role"] != "linear":
        planes = ("",)
    elif scheme["always_residual"]:
        planes = ("base", "residual")
    total = np.zeros(scheme["shape"])
    for plane in planes:
        prefix = f"{weight}.{plane}" if plane else weight
        codes = tensors[f"{prefix}.codes"]
        if plane in ("base", "residual"):
            codes = np.stack([codes % 16, codes // 16], axis=-1).reshape(scheme["shape"])
        scales = tensors[f"{prefix}.scales"].astype(np.float64)
        zero_points = tensors[f"{prefix}.zero_points"].astype(np.float64)
        length = codes.shape[1] // scales.shape[1]
        total += (codes - zero_points.repeat(length, axis=1)) * scales.repeat(length, axis=1)
    return total


def logits_of(graph: Graph, mode: PrecisionMode) -> np.ndarray:
    graph.bind(graph.allocate_cache(BLOCKS))
    (logits,) = forward(graph, PROMPT, mode, block_size=ENGINE.block_size)
    return logits.copy()


def fp32_logits(source: Path, directory: Path) -> np.ndarray:
    convert(source, directory, ConvertOptions(scheme=Scheme(group_size=32)), no_progress)
    return logits_of(ENGINE.compile(directory, {FP32}, EXACT), FP32)


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias"])
@pytest.mark.parametrize(
    ("options", "mode", "planes"),
    [
        pytest.param(EXACT, INT4, ("base",), id="shared int4"),
        pytest.param(EXACT, INT8, ("base", "residual"), id="shared int8"),
        pytest.param(SEPARATE, INT4, ("base",), id="separate int4"),
        pytest.param(SEPARATE, INT8, ("int8",), id="separate int8"),
    ],
)
def test_a_mode_computes_with_the_dequantized_weights_of_its_planes(
    name: str, options: CompileOptions, mode: PrecisionMode, planes: tuple[str, ...], tmp_path: Path
) -> None:
    store = quantized_store(name, tmp_path / "store")
    expected = fp32_logits(dequantized_source(store, name, planes, tmp_path / "source"), tmp_path / "expected")
    actual = logits_of(ENGINE.compile(store, options.graph_key(mode), options), mode)
    np.testing.assert_allclose(actual, expected, atol=1e-3)


def test_a_layer_that_always_uses_the_residual_does_so_in_int4(tmp_path: Path) -> None:
    store = quantized_store("llama", tmp_path / "store", int8_layers=(ALWAYS_INT8,))
    expected = fp32_logits(dequantized_source(store, "llama", ("base",), tmp_path / "source"), tmp_path / "expected")
    for options in (EXACT, SEPARATE):
        actual = logits_of(ENGINE.compile(store, options.graph_key(INT4), options), INT4)
        np.testing.assert_allclose(actual, expected, atol=1e-3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_store("llama", tmp_path_factory.mktemp("planes") / "store")


@pytest.fixture
def graph(store: Path) -> Iterator[Graph]:
    graph = ENGINE.compile(store, {INT4, INT8}, EXACT)
    yield graph
    graph.close()


def batch_of(modes: list[PrecisionMode]) -> StepBatch:
    """The prompt once for each of `modes`, end to end in one step; the logits of its last token are wanted."""
    length, blocks = len(PROMPT), 2
    rows = np.arange(length * len(modes), dtype=np.int32)
    in_int8 = np.repeat([mode is INT8 for mode in modes], length)
    return StepBatch(
        token_ids=np.array(PROMPT * len(modes), np.int64),
        positions=np.tile(np.arange(length), len(modes)),
        past_lens=np.zeros(len(modes), np.int32),
        subsequence_begins=np.arange(0, length * len(modes) + 1, length, dtype=np.int32),
        block_indices=np.arange(blocks * len(modes), dtype=np.int32),
        block_indices_begins=np.arange(0, blocks * len(modes) + 1, blocks, dtype=np.int32),
        residual_rows=rows[in_int8],
        logit_rows=np.arange(length - 1, length * len(modes), length, dtype=np.int32),
    )


def test_one_batch_serves_each_sequence_in_its_own_mode(graph: Graph) -> None:
    alone = {mode: logits_of(graph, mode)[-1] for mode in (INT4, INT8)}
    modes = [INT8, INT4, INT4, INT8]
    graph.bind(graph.allocate_cache(BLOCKS))
    together = graph.run(batch_of(modes))
    for row, mode in zip(together, modes, strict=True):
        np.testing.assert_allclose(row, alone[mode], atol=1e-4)
    assert np.abs(alone[INT4] - alone[INT8]).max() > 0.01


def test_a_step_may_want_no_logits_at_all(graph: Graph) -> None:
    """As the first chunk of a long prompt does."""
    graph.bind(graph.allocate_cache(BLOCKS))
    batch = batch_of([INT4])
    nothing = StepBatch(
        batch.token_ids,
        batch.positions,
        batch.past_lens,
        batch.subsequence_begins,
        batch.block_indices,
        batch.block_indices_begins,
        batch.residual_rows,
        logit_rows=np.empty(0, np.int32),
    )
    assert graph.run(nothing).shape[0] == 0


def test_what_one_graph_cached_another_continues(store: Path, graph: Graph) -> None:
    """A prompt read by FP32 and continued by INT8 from the same cache tensors is close to FP32 all along."""
    reference = ENGINE.compile(store, {FP32}, EXACT)
    expected = logits_of(reference, FP32)[-1]
    cache = graph.allocate_cache(BLOCKS)
    reference.bind(cache)
    graph.bind(cache)
    half = len(PROMPT) // 2
    list(forward(reference, PROMPT[:half], FP32, block_size=ENGINE.block_size))
    batch = batch_of([INT8])
    continued = graph.run(
        StepBatch(
            token_ids=batch.token_ids[half:],
            positions=batch.positions[half:],
            past_lens=np.array([half], np.int32),
            subsequence_begins=np.array([0, len(PROMPT) - half], np.int32),
            block_indices=batch.block_indices[:1],
            block_indices_begins=np.array([0, 1], np.int32),
            residual_rows=np.arange(len(PROMPT) - half, dtype=np.int32),
            logit_rows=np.array([len(PROMPT) - half - 1], np.int32),
        )
    )[0].copy()
    int8_alone = logits_of(graph, INT8)[-1]
    assert np.abs(continued - expected).max() <= np.abs(int8_alone - expected).max() * 1.5
    assert continued.argmax() == expected.argmax()


def test_a_graph_survives_letting_go_of_its_source(graph: Graph) -> None:
    before = logits_of(graph, INT8)
    graph.release_source()
    np.testing.assert_array_equal(logits_of(graph, INT8), before)


def test_separate_weights_need_a_set_with_an_int8_plane(tmp_path: Path) -> None:
    convert(GOLDEN / "llama", tmp_path / "store", ConvertOptions(scheme=Scheme(group_size=32)), no_progress)
    with pytest.raises(StoreError, match=r"no 8-bit plane.*--int8-plane"):
        ENGINE.compile(tmp_path / "store", {INT8}, SEPARATE)


def test_modes_of_different_graphs_are_not_compiled_together(store: Path) -> None:
    with pytest.raises(ValueError, match="no single graph serves"):
        ENGINE.compile(store, {INT4, FP16}, EXACT)


def test_the_cache_layout_does_not_depend_on_the_mode(store: Path) -> None:
    """All graphs of a model share one cache, with 8-bit keys and values by default."""
    options = CompileOptions()
    sizes = {ENGINE.compile(store, options.graph_key(mode), options).cache_block_bytes for mode in (INT4, FP16, FP32)}
    manifest = StoreManifest.read(store)
    keys = manifest.num_kv_heads * (32 + 8) * manifest.head_dim
    values = manifest.num_kv_heads * 32 * (manifest.head_dim + 8)
    assert sizes == {manifest.num_layers * (keys + values)}


def test_a_cache_of_another_precision_is_refused_with_what_to_do(store: Path) -> None:
    """The 16-bit arithmetic of FP16 has no float32 cache where the CPU has bfloat16."""
    exact = ENGINE.compile(store, {FP32}, EXACT)
    eight_bit = ENGINE.compile(store, {INT4, INT8}, CompileOptions())
    with pytest.raises(EngineError, match="u8 suits all modes"):
        eight_bit.bind(exact.allocate_cache(1))


@pytest.mark.parametrize("piece", [1, 7, 256])
def test_texts_read_side_by_side_get_the_logits_of_each_alone(piece: int, tmp_path: Path) -> None:
    graph = ENGINE.compile(quantized_store("llama", tmp_path / "store"), {INT8}, SEPARATE)
    texts = [PROMPT, PROMPT[5:25], PROMPT[:3]]
    graph.bind(graph.allocate_cache(len(texts) * blocks_for(len(PROMPT), ENGINE.block_size)))
    together = forward_together(graph, texts, INT8, block_size=ENGINE.block_size, last=10, piece=piece)
    for text, logits in zip(texts, together, strict=True):
        (alone,) = forward(graph, text, INT8, block_size=ENGINE.block_size)
        np.testing.assert_allclose(logits, alone[-10:], atol=1e-4)
