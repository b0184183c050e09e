"""all-MiniLM-L6-v2 as an ONNX file: the package has its weights alone. A BERT encoder with the mean of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

HIDDEN, HEADS, LAYERS = 384, 12, 6
EPSILON = 1e-12
MASKED = -1e4
"""Added to the scores of padding: far below any, and a number in float16 too."""
TOKENS = 30_522


class GraphWriter:
    """Nodes by what they compute; each method returns the name of the result."""

    def __init__(self, weights: Mapping[str, NDArray[Any]]) -> None:
        self._weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"node_{name}", **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, name: str) -> str:
        return self.constant(self._weights[name])

    def linear(self, x: str, name: str) -> str:
        matrix = self.constant(np.ascontiguousarray(self._weights[f"{name}.weight"].T))
        return self.op("Add", self.op("MatMul", x, matrix), self.weight(f"{name}.bias"))

    def norm(self, x: str, name: str) -> str:
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=EPSILON)

    def gelu(self, x: str) -> str:
        error = self.op("Erf", self.op("Div", x, self.constant(math.sqrt(2))))
        return self.op("Mul", self.op("Mul", x, self.constant(0.5)), self.op("Add", error, self.constant(1)))

    def attention(self, x: str, mask: str, name: str) -> str:
        size = HIDDEN // HEADS
        query, key, value = (self._heads(self.linear(x, f"{name}.self.{part}")) for part in ("query", "key", "value"))
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Add", self.op("Div", scores, self.constant(math.sqrt(size))), mask)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        rows = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        joined = self.op("Reshape", rows, self.constant([0, 0, HIDDEN], np.int64))
        return self.linear(joined, f"{name}.output.dense")

    def _heads(self, x: str) -> str:
        shape = self.constant([0, 0, HEADS, HIDDEN // HEADS], np.int64)
        return self.op("Transpose", self.op("Reshape", x, shape), perm=[0, 2, 1, 3])


def write_encoder(weights: Path, target: Path, layers: int = LAYERS) -> Path:
    """Writes the graph from a `.safetensors` file of that model: ids and mask [rows, tokens] to embeddings [rows, 384].

    The embeddings have length 1.
    """
    writer = GraphWriter(load_file(weights))
    embedding = _encode(writer, layers)
    writer.nodes.append(helper.make_node("Identity", [embedding], ["embedding"]))
    shape = ["rows", "tokens"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("input_ids", "attention_mask")]
    output = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["rows", HIDDEN])
    graph = helper.make_graph(writer.nodes, "encoder", inputs, [output], writer.constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), target)
    return target


def _encode(writer: GraphWriter, layers: int) -> str:
    mask = writer.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    hidden = _embedded(writer)
    scores_mask = writer.op("Unsqueeze", mask, writer.constant([1, 2], np.int64))
    padding = writer.op("Sub", writer.constant(1), scores_mask)
    scores_mask = writer.op("Mul", padding, writer.constant(MASKED))
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        attended = writer.attention(hidden, scores_mask, f"{name}.attention")
        hidden = writer.norm(writer.op("Add", attended, hidden), f"{name}.attention.output.LayerNorm")
        inner = writer.gelu(writer.linear(hidden, f"{name}.intermediate.dense"))
        outer = writer.linear(inner, f"{name}.output.dense")
        hidden = writer.norm(writer.op("Add", outer, hidden), f"{name}.output.LayerNorm")
    return _pooled(writer, hidden, mask)


def _embedded(writer: GraphWriter) -> str:
    words = writer.op("Gather", writer.weight("embeddings.word_embeddings.weight"), "input_ids")
    count = writer.op("Gather", writer.op("Shape", "input_ids"), writer.constant(1, np.int64))
    positions = writer.op("Range", writer.constant(0, np.int64), count, writer.constant(1, np.int64))
    places = writer.op("Gather", writer.weight("embeddings.position_embeddings.weight"), positions)
    segment = writer.constant(writer._weights["embeddings.token_type_embeddings.weight"][0])
    summed = writer.op("Add", writer.op("Add", words, places), segment)
    return writer.norm(summed, "embeddings.LayerNorm")


def _pooled(writer: GraphWriter, hidden: str, mask: str) -> str:
    """The mean of the tokens that are no padding, of length 1."""
    weights = writer.op("Unsqueeze", mask, writer.constant([2], np.int64))
    tokens = writer.constant([1], np.int64)
    total = writer.op("ReduceSum", writer.op("Mul", hidden, weights), tokens, keepdims=0)
    mean = writer.op("Div", total, writer.op("ReduceSum", weights, tokens, keepdims=0))
    return writer.op("Div", mean, writer.op("ReduceL2", mean, axes=[-1], keepdims=1))


def sentences(rows: int, tokens: int, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    """Token ids as that model's tokenizer makes them of words: [CLS] words [SEP], then padding."""
    random = np.random.default_rng(seed)
    ids = random.integers(1996, TOKENS, (rows, tokens))
    lengths = random.integers(max(3, tokens // 2), tokens + 1, rows)
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    ids[:, 0] = 101
    ids[np.arange(rows), lengths - 1] = 102
    return {"input_ids": ids * mask, "attention_mask": mask}
