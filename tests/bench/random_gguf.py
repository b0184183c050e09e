"""A GGUF file with random blocks in the shape of the synthetic model: speed does not depend on the values."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray
from tests.bench.synthetic import LLAMA_1_5B

from dskquant.architecture import DecoderConfig, read_decoder
from dskquant.decoder import EMBEDDING, tensor_shapes
from dskquant.sources.gguf import gguf_name

Quantization = gguf.GGMLQuantizationType
Blocks = NDArray[np.uint8]


class BlockLayout(NamedTuple):
    """Of a block of weights: random bytes but for its float16 scale."""

    weights: int
    nbytes: int
    scale_at: int
    scale: float


LAYOUTS = {
    Quantization.Q4_0: BlockLayout(32, 18, 0, 5e-3),
    Quantization.Q8_0: BlockLayout(32, 34, 0, 3e-4),
    Quantization.Q6_K: BlockLayout(256, 210, 208, 1e-5),
}
"""ggml-common.h: block_q4_0, block_q8_0, block_q6_K."""

EMBEDDING_TYPES = {Quantization.Q4_0: Quantization.Q6_K, Quantization.Q8_0: Quantization.Q8_0}
"""As llama-quantize chooses for an embedding that is the output matrix too."""


def write(path: Path, kind: Quantization, tokenizer_of: Path) -> None:
    """Writes the 1.5B Llama in `kind` blocks; `tokenizer_of` is a GGUF file whose tokenizer it borrows."""
    decoder = read_decoder(LLAMA_1_5B, "config.json")
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, decoder)
    _copy_tokenizer(gguf.GGUFReader(tokenizer_of), writer)
    rng = np.random.default_rng(1)
    for name, shape in tensor_shapes(decoder).items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, np.float32))
            continue
        chosen = EMBEDDING_TYPES[kind] if name == EMBEDDING else kind
        writer.add_tensor(gguf_name(name), _random_rows(rng, shape[0], shape[1], LAYOUTS[chosen]), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, decoder: DecoderConfig) -> None:
    writer.add_context_length(decoder.context_length)
    writer.add_embedding_length(decoder.hidden_size)
    writer.add_feed_forward_length(decoder.intermediate_size)
    writer.add_block_count(decoder.num_layers)
    writer.add_head_count(decoder.num_heads)
    writer.add_head_count_kv(decoder.num_kv_heads)
    writer.add_rope_dimension_count(decoder.head_dim)
    writer.add_layer_norm_rms_eps(decoder.rms_norm_eps)
    writer.add_rope_freq_base(LLAMA_1_5B["rope_theta"])
    writer.add_vocab_size(decoder.vocab_size)


def _copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            of_items = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of_items)


def _random_rows(rng: np.random.Generator, rows: int, columns: int, layout: BlockLayout) -> Blocks:
    """[rows, bytes of a row]."""
    blocks = rng.integers(0, 256, (rows, columns // layout.weights, layout.nbytes), np.uint8)
    blocks[..., layout.scale_at : layout.scale_at + 2] = np.array([layout.scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
