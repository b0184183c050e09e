"""A model with random weights and real shapes: speed does not depend on the values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dskquant.architecture import read_decoder
from dskquant.convert import ConvertOptions, convert
from dskquant.decoder import tensor_shapes
from dskquant.scheme import Scheme
from dskquant.store import TOKENIZER

LLAMA_1_5B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
GROUP_SIZE = 128
WEIGHT_SPREAD = 0.02


def make_store(tokenizer_of: Path, store: Path) -> None:
    """Writes random safetensors shards and converts them; `tokenizer_of` is a store whose tokenizer it borrows."""
    source = store.with_name(store.name + "-source")
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(LLAMA_1_5B))
    shutil.copy(tokenizer_of / TOKENIZER, source / TOKENIZER)
    _write_shards(source)
    options = ConvertOptions(
        model_id="llama-1.5b-random", scheme=Scheme(group_size=GROUP_SIZE, int8_plane=True), replace=True
    )
    convert(source, store, options, lambda *_: None)
    shutil.rmtree(source)


def _write_shards(source: Path) -> None:
    rng = np.random.default_rng(1)
    shapes = tensor_shapes(read_decoder(LLAMA_1_5B, "config.json"))
    weight_map = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32) * WEIGHT_SPREAD if len(shape) == 2 else np.ones(shape)
        file = f"{name}.safetensors"
        save_file({name: values.astype(np.float16)}, source / file)
        weight_map[name] = file
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
