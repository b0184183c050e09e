"""A GGUF file of llama.cpp: metadata, tokenizer and weights in one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from dskquant.architecture import DecoderConfig, read_decoder
from dskquant.decoder import EMBEDDING, FINAL_NORM, LM_HEAD, Shape
from dskquant.errors import SourceError
from dskquant.fields import Fields
from dskquant.rope import DEFAULT_THETA, divided_frequencies
from dskquant.sources.gguf_header import check_gguf_header
from dskquant.sources.protocol import SourceTensor, refuse_differences
from dskquant.store import CHAT_TEMPLATE, TOKENIZER
from dskquant.tokenizer import (
    bos_token_id_from_gguf,
    chat_template_from_gguf,
    end_token_ids_from_gguf,
    tokenizer_from_gguf,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # files of Mistral models call themselves llama
PERMUTED_ARCHITECTURE = "llama"
DEQUANTIZED_DTYPE = "f32"  # rounding to f16 shifts logits by up to 0.02 (SmolLM2-135M, Q4_1), float32 by less than 1e-4
ROPE_DIVISORS = "rope_freqs.weight"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id")

Kind = gguf.GGMLQuantizationType
FLOATS = {Kind.F16: "f16", Kind.BF16: "bf16", Kind.F32: "f32"}

TOP_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GGUFSource:
    """Raises SourceError, naming file and key or tensor, for a damaged file or an unknown kind of model."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._metadata = GGUFMetadata(path, self._reader)
        self.config: dict[str, Any] = self._read_config()
        self.decoder: DecoderConfig = read_decoder(self.config, str(path))

    @property
    def generation_config(self) -> dict[str, Any]:
        return {key: self.config[key] for key in SPECIAL_TOKENS if self.config.get(key) is not None}

    def write_tokenizer(self, store: Path) -> None:
        tokenizer_from_gguf(self._reader).save(str(store / TOKENIZER))
        template = chat_template_from_gguf(self._reader)
        if template is not None:
            (store / CHAT_TEMPLATE).write_text(template, encoding="utf-8")

    def check_tensors(self, expected: Mapping[str, Shape]) -> None:
        present = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        named = {gguf_name(name): shape for name, shape in expected.items()}
        refuse_differences(str(self.path), present, named, {ROPE_DIVISORS})

    def tensor(self, name: str) -> SourceTensor:
        tensor = self._tensors[gguf_name(name)]
        origin = f"{self.path}: tensor {tensor.name}"
        shape = _shape(tensor)
        order = self._row_order(name, shape)
        dtype = FLOATS.get(tensor.tensor_type)
        if dtype is None:
            return _quantized(origin, shape, tensor, order)
        values = _float_values(tensor, dtype, shape)
        if order is None:
            return SourceTensor.of_mapped(origin, values, dtype)
        return SourceTensor(origin, shape, dtype, dtype, lambda first, last: values[order[first:last]], None)

    def _row_order(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        """For each row of the weight, its row in the file; None where they are the same."""
        if self.decoder.architecture != PERMUTED_ARCHITECTURE or not re.search(r"\.[qk]_proj\.", name):
            return None
        return half_rotated_order(shape[0], self.decoder.head_dim)

    def _read_config(self) -> dict[str, Any]:
        """The Hugging Face configuration that this file's metadata amount to."""
        fields = self._metadata.fields
        hidden_size, heads = fields.count("embedding_length"), fields.count("attention.head_count")
        head_dim = fields.count("attention.key_length", max(hidden_size // heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if fields.count(key, head_dim) != head_dim:
                raise fields.refusal(key, f"other than the head size {head_dim} is not supported")
        config = {
            "model_type": self._metadata.architecture,
            "hidden_size": hidden_size,
            "intermediate_size": fields.count("feed_forward_length"),
            "num_hidden_layers": fields.count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": fields.count("context_length"),
            "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
            "vocab_size": self._vocab_size(),
            "hidden_act": "silu",
            "tie_word_embeddings": TOP_NAMES[LM_HEAD] not in self._tensors,
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self._tensors,
            "rope_parameters": self._rope_parameters(),
            "sliding_window": fields.values.get("attention.sliding_window") or None,
        }
        return config | self._special_tokens()

    def _vocab_size(self) -> int:
        if TOP_NAMES[EMBEDDING] not in self._tensors:
            raise SourceError(f"{self.path}: tensor {TOP_NAMES[EMBEDDING]} is missing")
        return int(self._tensors[TOP_NAMES[EMBEDDING]].shape[-1])

    def _special_tokens(self) -> dict[str, Any]:
        begin, ends = bos_token_id_from_gguf(self._reader), end_token_ids_from_gguf(self._reader)
        return {"bos_token_id": begin, "eos_token_id": list(ends) or None}

    def _rope_parameters(self) -> dict[str, Any]:
        scaling, fields = self._metadata.rope_scaling(), self._metadata.fields
        theta = fields.number("rope.freq_base", DEFAULT_THETA)
        if ROPE_DIVISORS not in self._tensors:
            return scaling | {"rope_theta": theta}
        if scaling["rope_type"] != "default":
            raise fields.refusal("rope.scaling.type", f"cannot be combined with the tensor {ROPE_DIVISORS}")
        # Converters of Llama 3.1 and later write the outcome of its formula as one divisor for each pair.
        divisors = [float(value) for value in self._tensors[ROPE_DIVISORS].data.ravel()]
        return divided_frequencies(theta, divisors, 1.0, fields.count("context_length"))


class GGUFMetadata:
    """The keys of a GGUF file; `fields` are those of its architecture, without their prefix."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self._path = path
        self._reader = reader
        self.architecture = str(self._contents("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise SourceError(f"{path}: general.architecture {self.architecture!r} is unknown; known: {known}")
        prefix = f"{self.architecture}."
        keys = [key for key in reader.fields if key.startswith(prefix)]
        self.fields = Fields(
            {key.removeprefix(prefix): self._contents(key) for key in keys}, f"{path}: {self.architecture}"
        )
        if self.fields.values.get("expert_count"):
            raise self.fields.refusal("expert_count", "other than 0 (a mixture of experts) is not supported")
        if (self._contents("split.count") or 1) > 1:
            raise SourceError(f"{path}: split.count: one part of several; join them with llama-gguf-split --merge")

    def rope_scaling(self) -> dict[str, Any]:
        """As `rope_parameters` of a Hugging Face configuration spells it."""
        fields = self.fields
        factor = fields.number("rope.scaling.factor", 1.0)
        rope_type = fields.values.get("rope.scaling.type", "linear")
        if rope_type == "none" or (rope_type == "linear" and factor == 1.0):
            return {"rope_type": "default"}
        if rope_type == "linear":
            return {"rope_type": "linear", "factor": factor}
        if rope_type != "yarn":
            raise fields.refusal("rope.scaling.type", f"{rope_type!r} is unknown; known: none, linear, yarn")
        original = fields.count("rope.scaling.original_context_length", fields.count("context_length"))
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": fields.number("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(factor)),
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        }

    def _contents(self, key: str) -> Any:
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise SourceError(f"{self._path}: {key} is not valid UTF-8") from error


def open_reader(path: Path) -> gguf.GGUFReader:
    """Opens a GGUF file after its header was checked. Raises SourceError when it is damaged."""
    check_gguf_header(path)
    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise SourceError(f"{path}: not a readable GGUF file: {error}") from error


def gguf_name(name: str) -> str:
    """How GGUF spells the weight with the Hugging Face name `name`."""
    match = LAYER_TENSOR.fullmatch(name)
    if match is None:
        return TOP_NAMES[name]
    layer, module, kind = match.groups()
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def half_rotated_order(rows: int, head_dim: int) -> NDArray[np.int64]:
    """Undoes the permutation of query and key rows in GGUF files of Llama.

    The converter interleaves the two halves of each head (row i of the first half, row i of the second, ...) because
    llama.cpp rotates neighbouring rows; the half-rotated form wants the halves one after the other.
    """
    order = np.arange(rows).reshape(-1, head_dim // 2, 2)
    return order.swapaxes(1, 2).ravel()


def _shape(tensor: gguf.ReaderTensor) -> Shape:
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


def _float_values(tensor: gguf.ReaderTensor, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    values = np.asarray(tensor.data)
    return values.view(np.uint16).reshape(shape) if dtype == "bf16" else values


def _quantized(
    origin: str, shape: tuple[int, ...], tensor: gguf.ReaderTensor, order: NDArray[np.int64] | None
) -> SourceTensor:
    if len(shape) == 1:
        raise SourceError(f"{origin}: type {tensor.tensor_type.name}; a vector must be F32, F16 or BF16")
    blocks = np.asarray(tensor.data)

    def rows(first: int, last: int) -> NDArray[np.float32]:
        part = blocks[first:last] if order is None else blocks[order[first:last]]
        try:
            return np.asarray(dequantize(part, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise SourceError(f"{origin}: type {tensor.tensor_type.name} cannot be dequantized") from error

    return SourceTensor(origin, shape, "f32", DEQUANTIZED_DTYPE, rows, None)
