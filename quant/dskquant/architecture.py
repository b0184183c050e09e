"""What a decoder is, in the terms of no engine: read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dskquant.fields import Fields
from dskquant.rope import Rope, read_rope

ACTIVATIONS = ("silu", "swish")  # two names of one function
MOST_LAYERS = 1024
MISTRAL_WINDOW = 4096  # what transformers takes where the configuration says nothing


@dataclass(frozen=True, slots=True)
class Family:
    """In what the architectures differ. A bias is there always, never, or where the configuration sets a flag."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: RMS norms, rotary positions, grouped-query attention, gated SiLU feed-forward."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    sliding_window: int | None  # tokens a layer looks back, itself included; None: all
    rms_norm_eps: float
    rope: Rope
    tied: bool  # lm_head is the embedding matrix
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def context_length(self) -> int:
        """Tokens that are attended to exactly: layers are computed with full attention, so the window caps them."""
        return min(self.max_positions, self.sliding_window or self.max_positions)


def read_decoder(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder that a Hugging Face config.json describes.

    `where` names the file in errors. Raises SourceError, naming the key and what is known, for an architecture, an
    activation function or a rope type that is not supported, and for sizes that are missing or do not fit together.
    """
    fields = Fields(config, where)
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise fields.refusal("model_type", f"{architecture!r} is unknown; known: {', '.join(FAMILIES)}")
    _refuse_variants(fields)
    family = FAMILIES[architecture]
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_positions = fields.count("max_position_embeddings")
    return DecoderConfig(
        architecture=architecture,
        num_layers=fields.count("num_hidden_layers", largest=MOST_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        max_positions=max_positions,
        sliding_window=_sliding_window(fields, architecture),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, head_dim, max_positions),
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=_has_bias(fields, family.qkv_bias),
        output_bias=_has_bias(fields, family.output_bias),
        mlp_bias=_has_bias(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
    )


def _refuse_variants(fields: Fields) -> None:
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise fields.refusal("hidden_act", f"{activation!r} is unknown; known: {', '.join(ACTIVATIONS)}")
    if fields.has("quantization_config"):
        raise fields.refusal("quantization_config", "is set: give the model in 16 or 32 bit")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    # Qwen3 is the one family whose heads are not hidden_size / heads wide where the key is absent.
    default = 128 if fields.values["model_type"] == "qwen3" else max(hidden_size // num_heads, 1)
    head_dim = fields.count("head_dim", default)
    if head_dim % 2:
        raise fields.refusal("head_dim", f"must be even, not {head_dim}")
    return head_dim


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
    return num_kv_heads


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    if architecture.startswith("qwen") and not fields.flag("use_sliding_window", False):
        return None
    if architecture == "mistral" and "sliding_window" not in fields.values:
        return MISTRAL_WINDOW
    return fields.count("sliding_window") if fields.has("sliding_window") else None


def _has_bias(fields: Fields, rule: bool | str) -> bool:
    return fields.flag(rule, False) if isinstance(rule, str) else rule
