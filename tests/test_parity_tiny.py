"""Logits of stored models against transformers in float32 (tests/golden/make_golden.py), for every architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import openvino as ov
import pytest
from golden_models import GOLDEN, PROMPT, TINY, golden_logits, weights_of, write_gguf
from openvino._offline_transformations import paged_attention_transformation

from dskquant.convert import ConvertOptions, convert
from dskquant.engines.openvino.core import CORE
from dskquant.engines.openvino.stateful import EXACT, StatefulModel
from dskquant.scheme import Scheme
from dskquant.store import IR_XML

TOLERANCE = 1e-3
PER_CHANNEL = ConvertOptions(scheme=Scheme(group_size=0), golden=False)
PAGED_INPUTS = {
    "input_ids": 1,
    "position_ids": 1,
    "past_lens": 1,
    "subsequence_begins": 1,
    "block_indices": 1,
    "block_indices_begins": 1,
    "max_context_len": 0,
}


def stored(source: Path, store: Path) -> Path:
    convert(source, store, PER_CHANNEL, lambda stage, done, total: None)
    return store / IR_XML


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    return {name: stored(GOLDEN / name, root / name) for name in TINY}


@pytest.mark.parametrize("name", TINY)
def test_prefill_gives_the_logits_of_transformers(stores: dict[str, Path], name: str) -> None:
    logits = StatefulModel(stores[name]).run(PROMPT)
    assert np.abs(logits - golden_logits(name)).max() <= TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_token_by_token_gives_the_same_logits(stores: dict[str, Path], name: str) -> None:
    model = StatefulModel(stores[name])
    pieces = [model.run(PROMPT[:20])] + [model.run([token]) for token in PROMPT[20:]]
    assert np.abs(np.concatenate(pieces) - golden_logits(name)).max() <= TOLERANCE


def test_the_goldens_tell_rope_scalings_apart() -> None:
    """Same weights, other frequencies: were the scaling ignored, the parity tests would fail by far."""
    plain = golden_logits("llama")
    for name in ("llama_rope_llama3", "llama_rope_yarn"):
        assert np.abs(golden_logits(name) - plain).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_the_paged_form_is_complete_and_gives_the_same_logits(stores: dict[str, Path], name: str) -> None:
    model = CORE.read_model(stores[name])
    paged_attention_transformation(model)
    operations = Counter(node.get_type_name() for node in model.get_ops())
    ranks = {port.any_name: port.partial_shape.rank.get_length() for port in model.inputs}
    caches = {name for name in ranks if name.startswith(("key_cache.", "value_cache."))}
    assert operations["PagedAttentionExtension"] == 2
    assert len(caches) == 4
    assert {name: rank for name, rank in ranks.items() if name not in caches} == PAGED_INPUTS
    assert np.abs(run_paged(model, PROMPT) - golden_logits(name)).max() <= TOLERANCE


def run_paged(model: ov.Model, tokens: list[int]) -> np.ndarray:
    """One prefill in block 0 of fresh caches."""
    compiled = CORE.compile_model(model, "CPU", EXACT)
    request = compiled.create_infer_request()
    for port in compiled.inputs:
        if "cache" in port.any_name:
            shape = [1 if size.is_dynamic else size.get_length() for size in port.partial_shape]
            request.set_tensor(port, ov.Tensor(port.element_type, ov.Shape(shape)))
    inputs = {
        "input_ids": np.array(tokens, np.int64),
        "position_ids": np.arange(len(tokens), dtype=np.int64),
        "past_lens": np.array([0], np.int32),
        "subsequence_begins": np.array([0, len(tokens)], np.int32),
        "block_indices": np.array([0], np.int32),
        "block_indices_begins": np.array([0, 1], np.int32),
        "max_context_len": np.array(len(tokens), np.int32),
    }
    return np.array(request.infer(inputs)["logits"]).reshape(len(tokens), -1)


def test_padding_in_a_batch_changes_nothing(stores: dict[str, Path]) -> None:
    """Two sequences of unequal length, the shorter padded on the left, as generation libraries batch them."""
    request = CORE.compile_model(stores["llama"], "CPU", EXACT).create_infer_request()
    short, long = PROMPT[:20], PROMPT
    padding = len(long) - len(short)
    inputs = {
        "input_ids": np.array([[0] * padding + short, long]),
        "attention_mask": np.array([[0] * padding + [1] * len(short), [1] * len(long)]),
        "position_ids": np.array([[1] * padding + list(range(len(short))), list(range(len(long)))]),
        "beam_idx": np.array([0, 1], np.int32),
    }
    logits = np.array(request.infer(inputs)["logits"])
    golden = golden_logits("llama")
    assert np.abs(logits[0, padding:] - golden[: len(short)]).max() <= TOLERANCE
    assert np.abs(logits[1] - golden).max() <= TOLERANCE


def test_an_optimum_export_is_taken_as_it_is(tmp_path: Path) -> None:
    xml = stored(GOLDEN / "llama_openvino", tmp_path / "store")
    for name in ("openvino_model.xml", "openvino_model.bin"):
        assert (tmp_path / "store" / name).read_bytes() == (GOLDEN / "llama_openvino" / name).read_bytes()
    # The export keeps its rope frequencies in 16 bit, which costs it more than the tolerance of ours.
    assert np.abs(StatefulModel(xml).run(PROMPT) - golden_logits("llama")).max() <= 0.05


def test_a_llama_gguf_has_its_rows_put_back(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", weights_of("llama"))
    logits = StatefulModel(stored(path, tmp_path / "store")).run(PROMPT)
    assert np.abs(logits - golden_logits("llama")).max() <= TOLERANCE


def test_a_qwen2_gguf_with_biases(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", weights_of("qwen2"))
    logits = StatefulModel(stored(path, tmp_path / "store")).run(PROMPT)
    assert np.abs(logits - golden_logits("qwen2")).max() <= TOLERANCE


def wide_heads(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(32)
    writer.add_value_length(32)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_qwen3_gguf_with_wide_heads_and_tied(tmp_path: Path, dtype: str) -> None:
    weights = {
        name: bits if dtype == "bf16" and bits.ndim == 2 else (bits.astype(np.uint32) << 16).view(np.float32)
        for name, bits in weights_of("qwen3").items()
    }
    path = write_gguf(tmp_path / "tiny.gguf", "qwen3", weights, wide_heads)
    conversion = convert(path, tmp_path / "store", PER_CHANNEL, lambda stage, done, total: None)
    assert conversion.manifest.dtype == dtype
    logits = StatefulModel(tmp_path / "store" / IR_XML).run(PROMPT)
    assert np.abs(logits - golden_logits("qwen3")).max() <= TOLERANCE


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


@pytest.mark.parametrize(("name", "settings"), [("llama_rope_linear", linear), ("llama_rope_yarn", yarn)])
def test_a_gguf_with_scaled_rope(tmp_path: Path, name: str, settings: Callable[[gguf.GGUFWriter], None]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", weights_of(name), settings)
    logits = StatefulModel(stored(path, tmp_path / "store")).run(PROMPT)
    assert np.abs(logits - golden_logits(name)).max() <= TOLERANCE


def llama3_divisors() -> np.ndarray:
    """As llama.cpp's converter writes them (convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors)."""
    factor, low, high, original = 8.0, 1.0, 4.0, 32
    divisors = []
    for frequency in 1.0 / (10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_a_llama3_gguf_carries_its_rope_as_divisors(tmp_path: Path) -> None:
    divisors = llama3_divisors()
    assert divisors.min() == 1.0
    assert divisors.max() == 8.0
    weights = weights_of("llama_rope_llama3")
    path = write_gguf(tmp_path / "tiny.gguf", "llama", weights, extra={"rope_freqs.weight": divisors})
    logits = StatefulModel(stored(path, tmp_path / "store")).run(PROMPT)
    assert np.abs(logits - golden_logits("llama_rope_llama3")).max() <= TOLERANCE
