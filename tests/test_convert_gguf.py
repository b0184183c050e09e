"""GGUF files: every quantized type, in pieces, and no damage that gets further than a refusal."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import _type_traits as quantized_types
from gguf.quants import dequantize
from golden_models import permuted, weights_of, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dskquant.architecture import read_decoder
from dskquant.convert import ConvertOptions, convert
from dskquant.decoder import tensor_shapes
from dskquant.errors import SourceError
from dskquant.scheme import Scheme
from dskquant.sources import open_source, protocol
from dskquant.sources.gguf import half_rotated_order
from dskquant.staging import stage_weights
from dskquant.store import CONFIG

PER_CHANNEL = ConvertOptions(scheme=Scheme(group_size=0), golden=False)
Kind = gguf.GGMLQuantizationType
Settings = Callable[[gguf.GGUFWriter], None]


def silent(stage: str, done: int, total: int) -> None:
    """Shows no progress."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", weights_of("llama"))


def write_matrix(path: Path, kind: Kind, rows: int, columns: int) -> np.ndarray:
    """A file with the embedding alone, of random blocks; returns what the blocks stand for."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    noise = np.random.default_rng(1).integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    write_gguf(path, "llama", {}, lambda writer: writer.add_tensor("token_embd.weight", noise, raw_dtype=kind))
    return np.asarray(dequantize(noise, kind))


@pytest.mark.parametrize(
    "kind", [kind for kind in quantized_types if kind is not Kind.BF16], ids=lambda kind: kind.name
)
def test_every_type_is_dequantized_as_the_gguf_package_does(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "PIECE_ELEMENTS", 1024)
    with np.errstate(all="ignore"):
        expected = write_matrix(tmp_path / "a.gguf", kind, rows=7, columns=512)
        tensor = open_source(tmp_path / "a.gguf").tensor("model.embed_tokens.weight")
        pieces = list(tensor.pieces())
    assert [len(piece) for piece in pieces] == [2, 2, 2, 1]
    assert np.array_equal(np.concatenate(pieces), expected, equal_nan=True)


def test_dequantizing_never_holds_a_whole_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PIECE_ELEMENTS", 1 << 13)
    zeros = np.zeros((4096, 34 * 8), np.uint8)  # 1 Mi weights: 4 MiB in float32
    write_gguf(
        tmp_path / "a.gguf",
        "llama",
        {},
        lambda writer: writer.add_tensor("token_embd.weight", zeros, raw_dtype=Kind.Q8_0),
    )
    source = open_source(tmp_path / "a.gguf")
    tracemalloc.start()
    try:
        weights = stage_weights(source, ["model.embed_tokens.weight"], None, tmp_path / "scratch", silent)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert weights["model.embed_tokens.weight"].values.nbytes == 4 << 20
    assert peak < 1 << 20


@given(heads=st.integers(1, 5), half=st.integers(1, 8))
def test_the_row_order_undoes_the_permutation_of_the_converter(heads: int, half: int) -> None:
    rows = np.arange(heads * 2 * half * 3).reshape(-1, 3)
    assert np.array_equal(permuted(rows, heads)[half_rotated_order(len(rows), 2 * half)], rows)


def test_the_configuration_written_says_what_the_metadata_say(tmp_path: Path) -> None:
    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(32)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(0.5)

    path = write_gguf(tmp_path / "a.gguf", "llama", weights_of("llama"), settings)
    source = open_source(path)
    assert source.decoder == read_decoder(source.config, CONFIG)
    assert source.decoder.context_length == 32
    assert source.decoder.rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))
    assert not source.decoder.tied
    assert source.generation_config == {"bos_token_id": 1, "eos_token_id": [2]}
    source.check_tensors(tensor_shapes(source.decoder))


def add(key: str, value: Any) -> Settings:
    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (add("llama.expert_count", 8), "llama: expert_count other than 0"),
        (add("split.count", 3), "split.count: one part of several"),
        (add("llama.attention.key_length", 15), "head_dim must be even"),
        (add("llama.attention.value_length", 8), "llama: attention.value_length other than the head size 16"),
        (add("llama.rope.dimension_count", 8), "llama: rope.dimension_count other than the head size 16"),
        (
            add("llama.rope.scaling.type", "longrope"),
            "rope.scaling.type 'longrope' is unknown; known: none, linear, yarn",
        ),
        (add("llama.rope.scaling.factor", -2.0), "rope.scaling.factor must be a positive number"),
    ],
)
def test_metadata_that_are_not_understood_name_file_and_key(tmp_path: Path, settings: Settings, message: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", weights_of("llama"), settings)
    with pytest.raises(SourceError) as refusal:
        open_source(path)
    assert str(refusal.value).startswith(str(path))
    assert message in str(refusal.value)


def test_an_unknown_architecture_is_refused_with_those_known(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "falcon", {})
    with pytest.raises(SourceError, match=r"general\.architecture 'falcon' is unknown; known: llama, qwen2, qwen3"):
        open_source(path)


def nan_weight(weights: dict[str, np.ndarray]) -> None:
    damaged = np.array(weights["model.layers.1.self_attn.q_proj.weight"])
    damaged[1, 1] = np.nan
    weights["model.layers.1.self_attn.q_proj.weight"] = damaged


def missing_weight(weights: dict[str, np.ndarray]) -> None:
    del weights["model.layers.1.mlp.gate_proj.weight"]


def misshapen_weight(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.0.self_attn.v_proj.weight"] = np.zeros((64, 64), np.float16)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nan_weight, "a.gguf: tensor blk.1.attn_q.weight: holds NaN or infinite values"),
        (missing_weight, "a.gguf: 1 tensors are missing: blk.1.ffn_gate.weight"),
        (misshapen_weight, "a.gguf: tensor blk.0.attn_v.weight: shape [64, 64], expected [32, 64]"),
    ],
)
def test_unusable_weights_are_refused_by_the_name_in_the_file(
    tmp_path: Path, damage: Callable[[dict[str, np.ndarray]], None], message: str
) -> None:
    weights = weights_of("llama")
    damage(weights)
    path = write_gguf(tmp_path / "a.gguf", "llama", weights)
    with pytest.raises(SourceError) as refusal:
        convert(path, tmp_path / "store", PER_CHANNEL, silent)
    assert message in str(refusal.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_type_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    numbers = np.zeros((256, 64), np.int32)
    path = write_gguf(tmp_path / "a.gguf", "llama", weights_of("llama") | {"lm_head.weight": numbers})
    with pytest.raises(SourceError, match=r"tensor output\.weight: type I32 cannot be dequantized"):
        convert(path, tmp_path / "store", PER_CHANNEL, silent)


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 5000, -1])
def test_truncated_files_are_refused(tiny: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(SourceError) as refusal:
        open_source(path)
    assert str(refusal.value).startswith(str(path))


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


HEADER = b"GGUF" + number(3, 4)
ARRAY, UINT8, F32 = number(9, 4), number(0, 4), number(0, 4)
NAME = number(1) + b"t"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF" + number(1, 4), "no GGUF file of version"),
        (b"GGUF" + number(3 << 24, 4), "no GGUF file of version"),  # big-endian
        (HEADER + number(1 << 60) + number(0), "do not fit in"),
        (HEADER + number(0) + number(1 << 60), "do not fit in"),
        (HEADER + number(0) + number(1) + number(1 << 62) + bytes(99), "reach past the end"),
        (HEADER + number(0) + number(1) + NAME + ARRAY + UINT8 + number(1 << 60) + bytes(99), "elements"),
        (HEADER + number(0) + number(1) + NAME + ARRAY + ARRAY + number(1) + bytes(99), "arrays of arrays"),
        (HEADER + number(0) + number(1) + NAME + number(77, 4) + bytes(99), "unknown value type 77"),
        (HEADER + number(1) + number(0) + NAME + number(1 << 30, 4) + bytes(99), "tensor t: 1073741824 dimensions"),
        (HEADER + number(1) + number(0) + NAME + number(1, 4) + number(0) + F32 + bytes(99), "tensor t: shape [0]"),
        (HEADER + number(1) + number(0) + NAME + number(1, 4) + number(1 << 63) + F32 + bytes(99), "lie outside"),
        (HEADER + number(1) + number(0) + NAME + number(1, 4) + number(8) + F32 + number(1 << 63), "lie outside"),
        (
            HEADER + number(1) + number(0) + NAME + number(1, 4) + number(8) + number(999, 4) + bytes(99),
            "unknown type 999",
        ),
    ],
)
def test_absurd_headers_are_refused_before_memory_is_taken(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(content)
    with pytest.raises(SourceError) as refusal:
        open_source(path)
    assert message in str(refusal.value)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    tensors = b"".join(number(1) + name + number(1, 4) + number(32) + F32 + number(64) for name in (b"a", b"b"))
    path = tmp_path / "overlap.gguf"
    path.write_bytes(HEADER + number(2) + number(0) + tensors + bytes(1000))
    with pytest.raises(SourceError, match="tensors a and b overlap"):
        open_source(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_header_gives_anything_but_a_refusal(tiny: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(tiny.read_bytes())
    header = content.find(b"output_norm.weight") + 100
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, header))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        source = open_source(path)
        source.check_tensors(tensor_shapes(source.decoder))
    except SourceError:
        return
    for name in tensor_shapes(source.decoder):
        assert sum(len(piece) for piece in source.tensor(name).pieces()) == source.tensor(name).shape[0]
