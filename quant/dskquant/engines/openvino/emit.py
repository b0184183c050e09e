"""Writes a decoder as a standard stateful OpenVINO IR, of the form that optimum-intel exports.

The patterns (RMS norm, rotary embedding, repeated key and value heads, the cache as ReadValue -> Gather -> Concat ->
Assign) are those that the engine's own passes look for: the CPU plugin fuses them, and `paged_attention_transformation`
turns the result into a paged graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino._offline_transformations import compress_model_transformation

from dskquant.architecture import DecoderConfig
from dskquant.decoder import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from dskquant.errors import StoreError
from dskquant.staging import StagedWeight

TYPES = {"f16": ov.Type.f16, "bf16": ov.Type.bf16, "f32": ov.Type.f32}
LARGEST_NEGATIVE = float(np.finfo(np.float16).min)  # of the mask; finite, so that a wholly masked row stays finite


def emit_ir(config: DecoderConfig, weights: Mapping[str, StagedWeight], path: Path) -> None:
    """Writes the model to `path` (.xml) and the weights beside it (.bin), each in its own dtype.

    The weights are read from where they are mapped, not copied. Raises StoreError when the files cannot be written.
    """
    model = build_model(config, weights)
    try:
        ov.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:
        raise StoreError(f"{path}: cannot be written: {str(error).strip().splitlines()[-1]}") from error


def build_model(config: DecoderConfig, weights: Mapping[str, StagedWeight]) -> ov.Model:
    """The stateful model. It reads the arrays of `weights` where they are: keep them alive as long as the model."""
    return _Builder(config, weights).build()


class _Builder:
    def __init__(self, config: DecoderConfig, weights: Mapping[str, StagedWeight]) -> None:
        self._config = config
        self._weights = weights
        self._sources: dict[str, ov.Node] = {}  # a tied matrix is one Constant
        self._assigns: list[ov.Node] = []
        self._input_ids = _parameter("input_ids", [-1, -1], ov.Type.i64)
        self._attention_mask = _parameter("attention_mask", [-1, -1], ov.Type.i64)
        self._position_ids = _parameter("position_ids", [-1, -1], ov.Type.i64)
        self._beam_idx = _parameter("beam_idx", [-1], ov.Type.i32)

    def build(self) -> ov.Model:
        config = self._config
        ids = ops.convert(self._input_ids, "i32")
        hidden = _named(ops.gather(self._weight(EMBEDDING), ids, _integer(0)), "model.embed_tokens")
        self._batch = _dimension(self._input_ids, 0)
        self._mask = self._causal_mask()
        self._cosines, self._sines = self._rotation()
        for layer in range(config.num_layers):
            hidden = self._layer(hidden, layer)
        hidden = self._norm(hidden, FINAL_NORM)
        head = self._weight(EMBEDDING if config.tied else LM_HEAD)
        logits = _named(ops.matmul(hidden, head, False, True), "lm_head")
        logits.output(0).get_tensor().set_names({"logits"})
        result = _named(ops.result(logits), "logits")
        parameters = [self._input_ids, self._attention_mask, self._position_ids, self._beam_idx]
        return ov.Model([result], self._assigns, parameters, config.architecture)

    def _layer(self, hidden: ov.Node, layer: int) -> ov.Node:
        prefix = layer_prefix(layer)
        attended = self._attention(self._norm(hidden, f"{prefix}.input_layernorm.weight"), layer)
        hidden = ops.add(hidden, attended)
        return ops.add(
            hidden, self._mlp(self._norm(hidden, f"{prefix}.post_attention_layernorm.weight"), f"{prefix}.mlp")
        )

    def _attention(self, normed: ov.Node, layer: int) -> ov.Node:
        config, prefix = self._config, f"{layer_prefix(layer)}.self_attn"
        queries = self._heads(normed, f"{prefix}.q_proj", config.num_heads, f"{prefix}.q_norm.weight")
        keys = self._heads(normed, f"{prefix}.k_proj", config.num_kv_heads, f"{prefix}.k_norm.weight")
        values = self._heads(normed, f"{prefix}.v_proj", config.num_kv_heads)
        keys = self._cached(self._rotate(keys), f"past_key_values.{layer}.keypresent.{layer}.key")
        values = self._cached(values, f"past_key_values.{layer}.valuepresent.{layer}.value")
        attended = ops.scaled_dot_product_attention(
            self._rotate(queries), self._repeated(keys), self._repeated(values), self._mask
        )
        width = config.num_heads * config.head_dim
        joined = ops.reshape(ops.transpose(attended, _integers(0, 2, 1, 3)), _integers(0, 0, width), True)
        return self._linear(joined, f"{prefix}.o_proj")

    def _mlp(self, normed: ov.Node, prefix: str) -> ov.Node:
        gate = ops.swish(self._linear(normed, f"{prefix}.gate_proj"))
        return self._linear(ops.multiply(gate, self._linear(normed, f"{prefix}.up_proj")), f"{prefix}.down_proj")

    def _heads(self, normed: ov.Node, module: str, heads: int, norm: str = "") -> ov.Node:
        """[batch, tokens, hidden] -> [batch, heads, tokens, head_dim]; each head normed where there is such a norm."""
        split = ops.reshape(self._linear(normed, module), _integers(0, 0, heads, self._config.head_dim), True)
        if norm in self._weights:
            split = self._norm(split, norm)
        return ops.transpose(split, _integers(0, 2, 1, 3))

    def _linear(self, inputs: ov.Node, module: str) -> ov.Node:
        product = _named(ops.matmul(inputs, self._weight(f"{module}.weight"), False, True), module)
        bias = f"{module}.bias"
        return ops.add(product, self._weight(bias)) if bias in self._weights else product

    def _norm(self, inputs: ov.Node, weight: str) -> ov.Node:
        mean_square = ops.reduce_mean(ops.power(inputs, _float(2.0)), _integers(-1), True)
        root = ops.sqrt(ops.add(mean_square, _float(self._config.rms_norm_eps)))
        return ops.multiply(self._weight(weight), ops.multiply(inputs, ops.divide(_float(1.0), root)))

    def _rotation(self) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines of the angles, [batch, 1, tokens, head_dim]; both halves of a head turn alike."""
        frequencies = ops.constant(np.array(self._config.rope.inverse_frequencies, np.float32))
        positions = ops.convert(ops.unsqueeze(self._position_ids, _integer(-1)), "f32")
        half = ops.multiply(positions, frequencies)
        angles = ops.concat([half, half], -1)
        factor = self._config.rope.attention_factor
        tables = [function(angles) for function in (ops.cos, ops.sin)]
        if factor != 1.0:
            tables = [ops.multiply(table, _float(factor)) for table in tables]
        cosines, sines = (ops.unsqueeze(table, _integer(1)) for table in tables)
        return cosines, sines

    def _rotate(self, heads: ov.Node) -> ov.Node:
        half, end = self._config.head_dim // 2, np.iinfo(np.int64).max
        first = ops.slice(heads, _integers(0), _integers(half), _integers(1), _integers(3))
        second = ops.slice(heads, _integers(half), _integers(end), _integers(1), _integers(3))
        turned = ops.concat([ops.multiply(second, _float(-1.0)), first], -1)
        return ops.add(ops.multiply(heads, self._cosines), ops.multiply(turned, self._sines))

    def _cached(self, current: ov.Node, name: str) -> ov.Node:
        """Past and current keys (or values) of a layer, [batch, kv_heads, past + tokens, head_dim]."""
        kv_heads, head_dim = self._config.num_kv_heads, self._config.head_dim
        shape = ops.concat([self._batch, _integers(kv_heads, 0, head_dim)], 0)
        empty = ops.broadcast(_float(0.0), shape)
        state = _variable(name, [-1, kv_heads, -1, head_dim])
        past = ov.op.read_value(empty, state)
        joined = ops.concat([ops.gather(past, self._beam_idx, _integer(0)), current], 2)
        self._assigns.append(ov.op.assign(joined, state))
        return joined

    def _repeated(self, heads: ov.Node) -> ov.Node:
        """Each key or value head once for every query head of its group."""
        config = self._config
        group = config.num_heads // config.num_kv_heads
        if group == 1:
            return heads
        each = ops.broadcast(
            ops.unsqueeze(heads, _integer(2)), _integers(1, 1, group, 1, 1), broadcast_spec="BIDIRECTIONAL"
        )
        return ops.reshape(each, _integers(0, config.num_heads, -1, config.head_dim), True)

    def _causal_mask(self) -> ov.Node:
        """[batch, 1, tokens, past + tokens]: 0 where a token may look, a large negative number elsewhere."""
        total, tokens = (
            ops.squeeze(_dimension(node, 1), _integer(0)) for node in (self._attention_mask, self._input_ids)
        )
        keys = ops.range(_integer(0), total, _integer(1), "i64")
        queries = ops.range(ops.subtract(total, tokens), total, _integer(1), "i64")
        causal = ops.less_equal(ops.unsqueeze(keys, _integer(0)), ops.unsqueeze(queries, _integer(1)))
        padding = ops.unsqueeze(ops.convert(self._attention_mask, "boolean"), _integers(1, 2))
        allowed = ops.logical_and(ops.unsqueeze(causal, _integers(0, 1)), padding)
        return ops.select(allowed, _float(0.0), _float(LARGEST_NEGATIVE))

    def _weight(self, name: str) -> ov.Node:
        """The weight in float32: a Constant called `name`, converted where it is stored in 16 bit."""
        if name not in self._sources:
            weight = self._weights[name]
            tensor = ov.Tensor(weight.values, ov.Shape(weight.values.shape), TYPES[weight.dtype])
            constant = _named(ov.op.Constant(tensor), name)
            self._sources[name] = constant if weight.dtype == "f32" else _decompressed(constant)
        return self._sources[name]


def _decompressed(constant: ov.Node) -> ov.Node:
    """A conversion to float32 with the mark that keeps the engine from folding it into a float32 copy of the weights.

    The mark cannot be set from Python; compressing a model sets it. So a one-number model lends its conversion.
    """
    lender = ov.Model([ops.result(ops.relu(_float(0.0)))], [])
    compress_model_transformation(lender)
    convert = next(node for node in lender.get_ops() if node.get_type_name() == "Convert")
    convert.set_argument(0, constant.output(0))
    convert.validate_and_infer_types()
    return _named(convert, f"{constant.get_friendly_name()}/f32")


def _parameter(name: str, shape: list[int], element_type: ov.Type) -> ov.Node:
    # The friendly name must equal the tensor name, or the paged transformation leaves the input as it is.
    parameter = _named(ops.parameter(shape, element_type), name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _variable(name: str, shape: list[int]) -> ov.op.util.Variable:
    info = ov.op.util.VariableInfo()
    info.variable_id, info.data_type, info.data_shape = name, ov.Type.f32, ov.PartialShape(shape)
    return ov.op.util.Variable(info)


def _dimension(node: ov.Node, axis: int) -> ov.Node:
    """One dimension of the shape of `node`, as a vector of one."""
    return ops.gather(ops.shape_of(node), _integers(axis), _integer(0))


def _named(node: ov.Node, name: str) -> ov.Node:
    node.set_friendly_name(name)
    return node


def _integer(value: int) -> ov.Node:
    return ops.constant(np.int64(value))


def _integers(*values: int) -> ov.Node:
    return ops.constant(np.array(values, np.int64))


def _float(value: float) -> ov.Node:
    return ops.constant(np.float32(value))
