"""Makes the golden data of the parity tests with torch and transformers, in float32.

    pip install torch transformers gguf safetensors tokenizers
    python tests/golden/make_golden.py [--gguf .cache/SmolLM2-135M-Instruct.Q4_1.gguf]

It writes, beside itself, one directory a tiny random model (config.json, safetensors, tokenizer.json and logits.npy
of `PROMPT`), `rope.json` with the frequencies of published models, and `smollm2.npz` for the real model.
`llama_openvino` is an export of `llama` by optimum-intel 2.2.0, with the tokenizer.json of `llama` and no tokenizer
models:

    optimum-cli export openvino --task text-generation-with-past --weight-format fp16 \\
        --model tests/golden/llama tests/golden/llama_openvino

`genai` holds what the model builder of onnxruntime-genai 0.18.0 makes of some of them, each named after the model and
the precision; `qwen2-int4` with zero-points:

    python -m onnxruntime_genai.models.builder -e cpu -c CACHE -p int4 --extra_options is_symmetric=false \\
        -i tests/golden/qwen2 -o tests/golden/genai/qwen2-int4

Every weight is rounded to the stored dtype before the logits are computed, so that a reader of the files has the very
same numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
VOCABULARY = 256
PROMPT = [(7 * position * position + 3 * position + 11) % VOCABULARY for position in range(32)]
HEAD_DIM = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TEXT = (
    "The lighthouse keeper wrote the weather down every evening: wind from the north-west, a falling barometer, "
    "and two fishing boats that had not come home. In the morning he"
)
CHATS = ("What is the capital of France, and which river runs through it?", "Write three sentences about the sea.")
GREEDY_TOKENS = 64
POSITIONS = 32
COLUMNS = 256


@dataclass(frozen=True)
class Golden:
    """One tiny model: what its configuration adds to `SIZES`, and how it is saved."""

    model_type: str
    dtype: torch.dtype = torch.float16
    shard_size: str = "50GB"
    config: dict[str, Any] = field(default_factory=dict)


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


GOLDENS = {
    "llama": Golden("llama"),
    "llama_tied_bias": Golden(
        "llama", config={"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32}
    ),
    "llama_rope_llama3": Golden(
        "llama",
        config=rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "llama_rope_linear": Golden("llama", dtype=torch.float32, config=rope("linear", factor=4.0)),
    "llama_rope_yarn": Golden("llama", config=rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "mistral": Golden("mistral", dtype=torch.bfloat16, config={"head_dim": 8, "sliding_window": 64}),
    "qwen2": Golden("qwen2", shard_size="100KB"),
    "qwen3": Golden("qwen3", dtype=torch.bfloat16, config={"head_dim": 32, "tie_word_embeddings": True}),
}


# The rope settings of published models, all on heads of `HEAD_DIM`.
ROPES = {
    "qwen2.5": {"max_position_embeddings": 32768, "rope_theta": 1000000.0},
    "deepseek-coder": {
        "max_position_embeddings": 16384,
        "rope_theta": 100000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama-3.1": {
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5-long": {
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "deepseek-v2": {
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}


def make_ropes() -> None:
    """The frequencies and attention factors that transformers computes for `ROPES`."""
    made = {}
    for name, settings in ROPES.items():
        sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "num_hidden_layers": 1}
        rotary = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **sizes, **copy.deepcopy(settings)))
        made[name] = {
            "config": settings,
            "inverse_frequencies": rotary.inv_freq.tolist(),
            "attention_factor": rotary.attention_scaling,
        }
    (HERE / "rope.json").write_text(json.dumps(made, indent=1) + "\n")


def randomize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Fills every parameter with values that spread the logits over several units, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(20260401)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            noise = 1.0 + 0.2 * noise
        elif "embed_tokens" in name:
            noise = 0.5 * noise
        else:
            noise = 0.3 * noise
        parameter.data = noise.to(dtype).to(torch.float32)


def byte_tokenizer() -> Tokenizer:
    """One token a byte: the smallest tokenizer that can write any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@torch.no_grad()
def make_tiny(name: str, golden: Golden) -> None:
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    config = AutoConfig.for_model(golden.model_type, **{**SIZES, **golden.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, golden.dtype)
    logits = model(torch.tensor([PROMPT])).logits[0]
    model.to(golden.dtype).save_pretrained(directory, max_shard_size=golden.shard_size)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    np.save(directory / "logits.npy", logits.numpy())
    print(f"{name}: logits {logits.min():.2f} .. {logits.max():.2f}, deviation {logits.std():.2f}")


@torch.no_grad()
def make_smollm2(gguf: Path) -> None:
    """Logits and greedy answers of the real model as transformers dequantizes it, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    prompt = tokenizer(TEXT, add_special_tokens=False).input_ids[:POSITIONS]
    logits = model(torch.tensor([prompt])).logits[0].double()
    columns = np.linspace(0, logits.shape[-1] - 1, COLUMNS).astype(np.int64)
    arrays = {
        "prompt": np.array(prompt),
        "columns": columns,
        "logits": logits[:, columns].float().numpy(),
        "argmax": logits.argmax(-1).numpy(),
        "logsumexp": logits.logsumexp(-1).numpy(),
    }
    for index, question in enumerate(CHATS):
        chat = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        ids = torch.tensor([chat["input_ids"] if hasattr(chat, "keys") else chat])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY_TOKENS, eos_token_id=None
        )
        arrays[f"chat{index}"] = ids[0].numpy()
        arrays[f"answer{index}"] = answer[0, ids.shape[1] :].numpy()
        print(tokenizer.decode(arrays[f"answer{index}"]))
    np.savez_compressed(HERE / "smollm2.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf; left out: only the tiny models")
    arguments = parser.parse_args()
    make_ropes()
    for name, golden in GOLDENS.items():
        make_tiny(name, golden)
    if arguments.gguf:
        make_smollm2(arguments.gguf)


if __name__ == "__main__":
    main()
