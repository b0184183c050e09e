"""Decoders that the model builder of onnxruntime-genai wrote (tests/golden/genai), against onnxruntime running them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from golden_models import GOLDEN, PROMPT, golden_logits
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dskquant.architecture import read_decoder
from dskquant.convert import ConvertOptions, convert
from dskquant.engines.openvino.stateful import StatefulModel
from dskquant.errors import SourceError
from dskquant.fields import Fields
from dskquant.rope import read_rope
from dskquant.scheme import Scheme
from dskquant.sources import open_source
from dskquant.sources.genai import rope_parameters
from dskquant.store import IR_XML, StoreManifest

GENAI = GOLDEN / "genai"
MODELS = ("llama_rope_llama3-int8", "llama_tied_bias-fp32", "qwen2-int4", "qwen3-int4")
"""8 bit; float with biases and a transposed tie; 4 bit with zero-points; 4 bit, tied, with norms of heads."""

TOLERANCE = 1e-3
FLOAT_ACTIVATIONS = 1  # accuracy_level of MatMulNBits


def stored(source: Path, store: Path) -> Path:
    options = ConvertOptions(scheme=Scheme(group_size=0), golden=False)
    convert(source, store, options, lambda stage, done, total: None)
    return store


def logits_of(directory: Path, tokens: list[int]) -> NDArray[np.float32]:
    """What onnxruntime makes of `tokens` with the builder's own graph, activations in float."""
    model = onnx.load(directory / "model.onnx")
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = FLOAT_ACTIVATIONS
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        "input_ids": np.array([tokens], np.int64),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
    }
    sizes = json.loads((directory / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    nothing = np.zeros((1, sizes["num_key_value_heads"], 0, sizes["head_size"]), np.float32)
    feeds |= {one.name: nothing for one in session.get_inputs() if one.name.startswith("past_key_values.")}
    logits: NDArray[np.float32] = session.run(["logits"], feeds)[0][0]
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_a_store_of_it_gives_the_logits_that_onnxruntime_gives(tmp_path: Path, name: str) -> None:
    store = stored(GENAI / name, tmp_path / "store")
    logits = StatefulModel(store / IR_XML).run(PROMPT)
    assert np.abs(logits - logits_of(GENAI / name, PROMPT)).max() <= TOLERANCE


def test_one_in_float_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    logits = StatefulModel(stored(GENAI / "llama_tied_bias-fp32", tmp_path / "store") / IR_XML).run(PROMPT)
    assert np.abs(logits - golden_logits("llama_tied_bias")).max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_its_configuration_is_that_of_the_model_the_builder_was_given(name: str) -> None:
    original = json.loads((GOLDEN / name.rsplit("-", 1)[0] / "config.json").read_text(encoding="utf-8"))
    expected, found = read_decoder(original, name), open_source(GENAI / name).decoder
    differing = {key for key in expected.__slots__ if getattr(expected, key) != getattr(found, key)} - {"rope"}
    assert not differing
    assert found.rope.inverse_frequencies == pytest.approx(expected.rope.inverse_frequencies, rel=1e-6)
    assert found.rope.attention_factor == pytest.approx(expected.rope.attention_factor)


def test_the_store_says_where_it_comes_from_and_has_the_tokenizer_and_the_end_tokens(tmp_path: Path) -> None:
    manifest = StoreManifest.read(stored(GENAI / "qwen3-int4", tmp_path / "store"))
    assert manifest.source == {"kind": "onnxruntime-genai", "name": "qwen3-int4"}
    assert manifest.end_token_ids == (2,)  # and 256 in the file, which the model cannot make
    assert (tmp_path / "store" / "tokenizer.json").read_bytes() == (GENAI / "qwen3-int4/tokenizer.json").read_bytes()


@given(
    base=st.floats(100, 5e6),
    pairs=st.integers(2, 64),
    positions=st.integers(2, 4096),
    factor=st.sampled_from([1.0, 1.2]),
    dtype=st.sampled_from([np.float32, np.float16]),
)
def test_frequencies_are_read_out_of_any_table_of_angles(
    base: float, pairs: int, positions: int, factor: float, dtype: type[np.floating[Any]]
) -> None:
    frequencies = base ** (-np.arange(pairs) / pairs)
    angles = np.arange(positions)[:, None] * frequencies
    cosines, sines = ((factor * f(angles)).astype(dtype).astype(np.float64) for f in (np.cos, np.sin))
    rope = read_rope(Fields({"rope_parameters": rope_parameters(cosines, sines)}, "table"), 2 * pairs, positions)
    # Angles are what counts: at any position they are as exact as the table is.
    errors = np.abs(np.array(rope.inverse_frequencies) - frequencies) * positions
    assert errors.max() < (4e-3 if dtype is np.float16 else 2e-3)
    assert rope.attention_factor == pytest.approx(factor, rel=2e-3)


# What is wrong with a directory is told by name


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GENAI / "qwen2-int4", tmp_path / "model"))


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"].update(changes)
    path.write_text(json.dumps(config), encoding="utf-8")


def change_node(directory: Path, operator: str, attribute: str, value: float) -> None:
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == operator:
            kept = [one for one in node.attribute if one.name != attribute]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])
    onnx.save(model, directory / "model.onnx")


def refusal(directory: Path, tmp_path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        stored(directory, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"type": "phi3"}, "model_type 'phi3' is unknown; known: llama"),
        ({"type": "whisper", "decoder": None}, "decoder must be an object; only decoders of text are supported"),
        ({"decoder": {"filename": "../model.onnx"}}, "model.decoder.filename: '../model.onnx' is not a file beside it"),
        ({"decoder": {"filename": "other.onnx"}}, "other.onnx: missing"),
        ({"vocab_size": -3}, "vocab_size must be a whole number"),
    ],
)
def test_a_configuration_that_cannot_be(directory: Path, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    change_config(directory, **changes)
    assert told in refusal(directory, tmp_path)


def test_a_graph_of_another_width_than_the_configuration_tells(directory: Path, tmp_path: Path) -> None:
    sizes = json.loads((directory / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    change_config(directory, decoder=sizes | {"num_key_value_heads": 4})
    assert "tensor model.layers.0.self_attn" in refusal(directory, tmp_path)


def test_a_graph_with_fewer_layers_than_the_configuration_tells(directory: Path, tmp_path: Path) -> None:
    sizes = json.loads((directory / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    change_config(directory, decoder=sizes | {"num_hidden_layers": 3})
    assert "tensors are missing: model.layers.2" in refusal(directory, tmp_path)


@pytest.mark.parametrize(
    ("operator", "attribute", "value", "told"),
    [
        ("GroupQueryAttention", "softcap", 30.0, "softcap of attention is 30; supported: 0"),
        ("GroupQueryAttention", "rotary_interleaved", 1, "rotary_interleaved of attention is 1; supported: 0"),
        ("GroupQueryAttention", "scale", 0.5, "scale of attention is 0.5"),
        ("MatMulNBits", "bits", 2, "only 4 or 8 bits"),
        ("MatMulNBits", "block_size", 64, "weight_scales: float32 [128, 2]; [128, 1] of its kind is needed"),
        ("SkipSimplifiedLayerNormalization", "epsilon", 0.5, "epsilon of SimplifiedLayerNormalization: must be one"),
    ],
)
def test_a_node_that_computes_something_else(
    directory: Path, tmp_path: Path, operator: str, attribute: str, value: float, told: str
) -> None:
    change_node(directory, operator, attribute, value)
    assert told in refusal(directory, tmp_path)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("table", ["cos_cache", "sin_cache"])
def test_a_table_that_holds_no_angles(directory: Path, tmp_path: Path, table: str, value: float) -> None:
    model = onnx.load(directory / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == table:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(tensor.dims, value, np.float32), table))
    onnx.save(model, directory / "model.onnx")
    assert "cos_cache and sin_cache are no cosines and sines" in refusal(directory, tmp_path)


def test_a_matrix_without_its_scales(directory: Path, tmp_path: Path) -> None:
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    del node.input[2:]
    onnx.save(model, directory / "model.onnx")
    assert "is missing" in refusal(directory, tmp_path)


def test_an_operator_that_no_supported_decoder_has(directory: Path, tmp_path: Path) -> None:
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Sigmoid").op_type = "Tanh"
    onnx.save(model, directory / "model.onnx")
    assert "operators Tanh; supported: Add," in refusal(directory, tmp_path)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_files_that_end_too_early(directory: Path, tmp_path: Path, file: str, keep: float) -> None:
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content[: int(len(content) * keep)])
    assert str(directory / "model.onnx") in refusal(directory, tmp_path)


def test_weights_outside_of_the_directory_are_not_read(directory: Path, tmp_path: Path) -> None:
    (directory / "model.onnx.data").rename(tmp_path / "elsewhere.data")
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../elsewhere.data"
    onnx.save(model, directory / "model.onnx")
    assert "is not a file beside it" in refusal(directory, tmp_path)
