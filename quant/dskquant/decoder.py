"""The weights of a decoder: their names as Hugging Face spells them, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator

from dskquant.architecture import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every weight of the decoder, in the order they are used; matrices are [outputs, inputs]."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"{layer_prefix(layer)}.{name}": shape for name, shape in _layer_shapes(config)})
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tied:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield from _linear("self_attn.q_proj", queries, hidden, config.qkv_bias)
    yield from _linear("self_attn.k_proj", keys, hidden, config.qkv_bias)
    yield from _linear("self_attn.v_proj", keys, hidden, config.qkv_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield from _linear("self_attn.o_proj", hidden, queries, config.output_bias)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, config.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
