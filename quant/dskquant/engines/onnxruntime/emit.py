"""Writes a decoder as an ONNX graph over KV slots, from the description that the OpenVINO IR is written from.

Attention is `com.microsoft.GroupQueryAttention` with the rotary embedding inside; it appends to the slots in place, as
past and present are bound to one buffer. Its `query_seqlens` lets a slot of the batch sit a step out.
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from dskquant.architecture import DecoderConfig
from dskquant.decoder import FINAL_NORM, layer_prefix
from dskquant.engines.onnxruntime.graph_writer import CONTRIB, Dimension, GraphWriter
from dskquant.engines.onnxruntime.stored_weights import StoredWeights

INPUT_IDS = "input_ids"  # [B, S] int64
TOTAL_LENS = "total_lens_minus_one"  # [B] int32
NEW_LENS = "new_lens"  # [B] int32; 0: the slot sits this step out
LONGEST = "longest"  # scalar int32, an upper bound of the lengths
POSITIONS = "positions"  # [B, S] int64; only where the rotary embedding is not inside the attention
RESIDUAL_ROWS = "residual_rows"  # [R, 2] int64: index in the batch, index of the token
LOGIT_ROWS = "logit_rows"  # [L, 2] int64
LOGITS = "logits"


class Linear(NamedTuple):
    """A linear layer: a matrix [outputs, inputs], and a bias if it has one."""

    module: str
    outputs: int
    inputs: int
    bias: NDArray[np.float32] | None  # [outputs]


class MatrixKernels(Protocol):
    """How the matrices of a decoder are multiplied with: from the source weights or from a parameter set."""

    def embed(self, ids: str) -> str:
        """The embeddings [B, S, hidden] of token ids [B, S]."""
        ...

    def linears(self, tokens: str, layers: Sequence[Linear]) -> Sequence[str]:
        """The products of tokens [B, S, inputs] with linear layers, which all read these."""
        ...

    def logits(self, hidden: str) -> str:
        """The logits [L, vocabulary] of hidden states [L, hidden]."""
        ...


ROTARY_HEAD_MULTIPLE = 16
"""Attention rotates heads of a multiple of this size; others are rotated before."""

KernelsFor = Callable[[GraphWriter], MatrixKernels]


def past_name(part: str, layer: int) -> str:
    """Input of the cached "key" or "value" of a layer, [B, kv_heads, capacity, head_dim]."""
    return f"past_{part}.{layer}"


def present_name(part: str, layer: int) -> str:
    """Output that must be bound to the same memory as the input."""
    return f"present_{part}.{layer}"


def emit_decoder(config: DecoderConfig, weights: StoredWeights, kernels_for: KernelsFor) -> GraphWriter:
    """The graph of the decoder. Norms and biases come from `weights`, matrices from the kernels."""
    writer = GraphWriter(config.architecture)
    _Emitter(config, weights, writer, kernels_for(writer)).emit()
    return writer


class _Emitter:
    def __init__(
        self, config: DecoderConfig, weights: StoredWeights, writer: GraphWriter, kernels: MatrixKernels
    ) -> None:
        self._config = config
        self._weights = weights
        self._writer = writer
        self._kernels = kernels
        self._rotates_inside = config.head_dim % ROTARY_HEAD_MULTIPLE == 0

    def emit(self) -> None:
        writer, config = self._writer, self._config
        ids = writer.input(INPUT_IDS, TensorProto.INT64, ["B", "S"])
        writer.input(TOTAL_LENS, TensorProto.INT32, ["B"])
        writer.input(NEW_LENS, TensorProto.INT32, ["B"])
        writer.input(LONGEST, TensorProto.INT32, [])
        rows = writer.input(LOGIT_ROWS, TensorProto.INT64, ["L", 2])
        self._emit_rotation()
        if not self._rotates_inside:
            writer.input(POSITIONS, TensorProto.INT64, ["B", "S"])
        hidden, update = self._kernels.embed(ids), ""
        for layer in range(config.num_layers):
            hidden, update = self._layer(hidden, update, layer)
        hidden = writer.node("Add", [writer.node("GatherND", [value, rows]) for value in (hidden, update)])
        normed = writer.node(
            "SimplifiedLayerNormalization",
            [hidden, self._float(FINAL_NORM, config.hidden_size)],
            axis=-1,
            epsilon=config.rms_norm_eps,
        )
        writer.node("Identity", [self._kernels.logits(normed)], name=LOGITS)
        writer.output(LOGITS, TensorProto.FLOAT, ["L", config.vocab_size])

    def _layer(self, hidden: str, update: str, layer: int) -> tuple[str, str]:
        """Hidden states before the last update, and that update: the next norm adds them."""
        prefix = layer_prefix(layer)
        hidden, normed = self._add_and_norm(hidden, update, f"{prefix}.input_layernorm.weight")
        attended = self._attention(normed, layer)
        hidden, normed = self._add_and_norm(hidden, attended, f"{prefix}.post_attention_layernorm.weight")
        return hidden, self._mlp(normed, f"{prefix}.mlp")

    def _add_and_norm(self, hidden: str, update: str, weight: str) -> tuple[str, str]:
        writer, epsilon = self._writer, self._config.rms_norm_eps
        scale = self._float(weight, self._config.hidden_size)
        if not update:
            return hidden, writer.node("SimplifiedLayerNormalization", [hidden, scale], axis=-1, epsilon=epsilon)
        total, normed = f"{weight}.input", f"{weight}.output"
        writer.nodes(
            "SkipSimplifiedLayerNormalization",
            [hidden, update, scale],
            [normed, "", "", total],
            domain=CONTRIB,
            epsilon=epsilon,
        )
        return total, normed

    def _attention(self, normed: str, layer: int) -> str:
        config, prefix = self._config, f"{layer_prefix(layer)}.self_attn"
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widths = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        queries, keys, values = self._linears(normed, prefix, widths, config.hidden_size, config.qkv_bias)
        if config.qk_norm:
            queries = self._norm_heads(queries, config.num_heads, f"{prefix}.q_norm.weight")
            keys = self._norm_heads(keys, config.num_kv_heads, f"{prefix}.k_norm.weight")
        if not self._rotates_inside:
            queries, keys = self._rotate(queries, config.num_heads), self._rotate(keys, config.num_kv_heads)
        attended = self._attend(queries, keys, values, layer)
        (output,) = self._linears(attended, prefix, {"o_proj": config.hidden_size}, width, config.output_bias)
        return output

    def _attend(self, queries: str, keys: str, values: str, layer: int) -> str:
        config, writer = self._config, self._writer
        shape: list[Dimension] = ["B", config.num_kv_heads, "C", config.head_dim]
        pasts = [writer.input(past_name(part, layer), TensorProto.FLOAT, shape) for part in ("key", "value")]
        presents = [present_name(part, layer) for part in ("key", "value")]
        for name in presents:
            writer.output(name, TensorProto.FLOAT, shape)
        rotation = ["cosines", "sines"] if self._rotates_inside else ["", ""]
        # position ids, bias, sink, key and value scale, query and key norm
        left_out = [""] * 7
        attended, *_ = writer.nodes(
            "GroupQueryAttention",
            [queries, keys, values, *pasts, TOTAL_LENS, LONGEST, *rotation, *left_out, NEW_LENS],
            [f"attended.{layer}", *presents],
            domain=CONTRIB,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            do_rotary=int(self._rotates_inside),
        )
        return attended

    def _rotate(self, values: str, heads: int) -> str:
        inputs = [values, POSITIONS, "cosines", "sines"]
        return self._writer.node(
            "RotaryEmbedding",
            inputs,
            domain=CONTRIB,
            num_heads=heads,
        )

    def _norm_heads(self, values: str, heads: int, weight: str) -> str:
        config, writer = self._config, self._writer
        split = writer.node("Reshape", [values, writer.integers(0, 0, heads, config.head_dim)])
        normed = writer.node(
            "SimplifiedLayerNormalization",
            [split, self._float(weight, config.head_dim)],
            axis=-1,
            epsilon=config.rms_norm_eps,
        )
        return writer.node("Reshape", [normed, writer.integers(0, 0, heads * config.head_dim)])

    def _mlp(self, normed: str, prefix: str) -> str:
        config, writer = self._config, self._writer
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = {"gate_proj": inner, "up_proj": inner}
        gate, up = self._linears(normed, prefix, widths, hidden, config.mlp_bias)
        activated = writer.node("Mul", [gate, writer.node("Sigmoid", [gate])])
        product = writer.node("Mul", [activated, up])
        (output,) = self._linears(product, prefix, {"down_proj": hidden}, inner, config.mlp_bias)
        return output

    def _linears(
        self, tokens: str, prefix: str, outputs: Mapping[str, int], inputs: int, has_bias: bool
    ) -> Sequence[str]:
        """`outputs`: of each layer, by its name in `prefix`."""
        layers = []
        for name, width in outputs.items():
            module = f"{prefix}.{name}"
            bias = self._weights.float32(f"{module}.bias", (width,)) if has_bias else None
            layers.append(Linear(module, width, inputs, bias))
        return self._kernels.linears(tokens, layers)

    def _float(self, name: str, size: int) -> str:
        return self._writer.constant(name, self._weights.float32(name, (size,)))

    def _emit_rotation(self) -> None:
        cosines, sines = rotation(self._config)
        self._writer.constant("cosines", cosines)
        self._writer.constant("sines", sines)


def rotation(config: DecoderConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines of the angle of each position and pair, [context, head_dim / 2], times the attention factor."""
    frequencies = np.array(config.rope.inverse_frequencies, np.float32)
    angles = np.arange(config.context_length, dtype=np.float32)[:, None] * frequencies
    factor = np.float32(config.rope.attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor
