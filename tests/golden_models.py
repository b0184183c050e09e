"""The tiny models in tests/golden, and GGUF files made from them the way llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.sources.gguf import gguf_name

GOLDEN = Path(__file__).parent / "golden"
SMOLLM2 = Path(__file__).parent.parent / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = (
    "llama",
    "llama_tied_bias",
    "llama_rope_llama3",
    "llama_rope_linear",
    "llama_rope_yarn",
    "mistral",
    "qwen2",
    "qwen3",
)
PROMPT = [(7 * position * position + 3 * position + 11) % 256 for position in range(32)]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16

Tensors = dict[str, NDArray[Any]]


def golden_logits(name: str) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = np.load(GOLDEN / name / "logits.npy")
    return logits


def weights_of(name: str) -> Tensors:
    """All tensors of a golden model by Hugging Face name."""
    files = [MappedSafetensors(path) for path in sorted((GOLDEN / name).glob("*.safetensors"))]
    return {tensor: file.array(tensor) for file in files for tensor in file.names}


def permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to query and key rows of a Llama (convert_hf_to_gguf.py, LlamaModel.permute)."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, NDArray[Any]],
    settings: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    extra: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """Writes a GGUF file with the sizes of the golden models; `tensors` by Hugging Face name, `extra` by their own.

    Arrays of uint16 are bfloat16 bit patterns.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    _add_byte_tokenizer(writer)
    settings(writer)
    for name, values in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2]) if architecture == "llama" else None
        _add_tensor(writer, gguf_name(name), permuted(values, heads) if heads else np.array(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[Any]) -> None:
    if values.dtype == np.uint16:
        writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, values)


def _add_byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = json.loads((GOLDEN / "llama" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list([*tokens[:-1], "ab"])  # a list of merges must not be empty, and a merge makes a token
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
