"""all-MiniLM-L6-v2, an encoder of sentences, as an ONNX graph made from its published weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file
from tests.plain_models import CACHE, Arrays, present
from tokenizers import Tokenizer

MINILM = CACHE / "minilm" / "model.safetensors"
LAYERS, HEADS, WIDTH, EPSILON = 6, 12, 384, 1e-12
MASKED = -1e9
LONGEST = 32
VOCABULARY = 30_522


class Emitter:
    """Collects the nodes and the constants of a graph."""

    def __init__(self, weights: Arrays) -> None:
        self.weights, self.nodes, self.constants = weights, list[onnx.NodeProto](), dict[str, NDArray[Any]]()

    def op(self, kind: str, *inputs: str | NDArray[Any], to: str = "", **attributes: Any) -> str:
        name = to or f"{kind}_{len(self.nodes)}"
        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        self.nodes.append(helper.make_node(kind, names, [name], name=name, **attributes))
        return name

    def constant(self, value: NDArray[Any]) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def linear(self, x: str, name: str) -> str:
        product = self.op("MatMul", x, self.weights[f"{name}.weight"].T.copy(), to=f"{name}.MatMul")
        return self.op("Add", product, self.weights[f"{name}.bias"])

    def norm(self, x: str, name: str) -> str:
        scale, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=EPSILON)


def write_minilm(path: Path) -> Path:
    """`embedding` [rows, 384], of length 1, from `input_ids` and `attention_mask` [rows, tokens]."""
    graph = Emitter(load_file(present(MINILM)))
    mask = _cast(graph)
    x = _embed(graph)
    hidden = graph.op("Mul", graph.op("Sub", np.float32(1), mask), np.float32(MASKED))
    bias = graph.op("Unsqueeze", hidden, np.int64([1, 2]))
    for layer in range(LAYERS):
        x = _layer(graph, x, bias, f"encoder.layer.{layer}")
    _pool(graph, x, mask)
    _save(graph, path)
    return path


def encoded(sentences: Sequence[str]) -> Arrays:
    """As the graph takes them, padded to LONGEST tokens."""
    tokenizer = Tokenizer.from_file(str(MINILM.with_name("tokenizer.json")))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding(length=LONGEST)
    rows = tokenizer.encode_batch(list(sentences))
    return {
        "input_ids": np.int64([row.ids for row in rows]),
        "attention_mask": np.int64([row.attention_mask for row in rows]),
    }


def random_sentences(rows: int, tokens: int, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    """Token ids as that model's tokenizer makes them of words: [CLS] words [SEP], then padding."""
    random = np.random.default_rng(seed)
    ids = random.integers(1996, VOCABULARY, (rows, tokens))
    lengths = random.integers(max(3, tokens // 2), tokens + 1, rows)
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    ids[:, 0] = 101
    ids[np.arange(rows), lengths - 1] = 102
    return {"input_ids": ids * mask, "attention_mask": mask}


def _cast(graph: Emitter) -> str:
    graph.nodes.append(helper.make_node("Cast", ["attention_mask"], ["mask"], name="mask", to=TensorProto.FLOAT))
    return "mask"


def _embed(graph: Emitter) -> str:
    tokens = graph.op("Slice", graph.op("Shape", "input_ids"), np.int64([1]), np.int64([2]))
    positions = graph.op("Slice", graph.weights["embeddings.position_embeddings.weight"], np.int64([0]), tokens)
    words = graph.op("Gather", graph.weights["embeddings.word_embeddings.weight"], "input_ids")
    placed = graph.op("Add", words, positions)
    typed = graph.op("Add", placed, graph.weights["embeddings.token_type_embeddings.weight"][0])
    return graph.norm(typed, "embeddings.LayerNorm")


def _layer(graph: Emitter, x: str, bias: str, name: str) -> str:
    heads = np.int64([0, 0, HEADS, WIDTH // HEADS])
    q, k, v = (
        graph.op("Reshape", graph.linear(x, f"{name}.attention.self.{which}"), heads)
        for which in ("query", "key", "value")
    )
    keys = graph.op("Transpose", k, perm=[0, 2, 3, 1])
    scores = graph.op("MatMul", graph.op("Transpose", q, perm=[0, 2, 1, 3]), keys)
    scaled = graph.op("Div", scores, np.float32(math.sqrt(WIDTH // HEADS)))
    weights = graph.op("Softmax", graph.op("Add", scaled, bias), axis=-1)
    read = graph.op("MatMul", weights, graph.op("Transpose", v, perm=[0, 2, 1, 3]))
    joined = graph.op("Reshape", graph.op("Transpose", read, perm=[0, 2, 1, 3]), np.int64([0, 0, WIDTH]))
    attended = graph.op("Add", graph.linear(joined, f"{name}.attention.output.dense"), x)
    x = graph.norm(attended, f"{name}.attention.output.LayerNorm")
    wide = _gelu(graph, graph.linear(x, f"{name}.intermediate.dense"))
    return graph.norm(graph.op("Add", graph.linear(wide, f"{name}.output.dense"), x), f"{name}.output.LayerNorm")


def _gelu(graph: Emitter, x: str) -> str:
    cumulative = graph.op("Add", graph.op("Erf", graph.op("Div", x, np.float32(math.sqrt(2)))), np.float32(1))
    return graph.op("Mul", graph.op("Mul", x, np.float32(0.5)), cumulative)


def _pool(graph: Emitter, x: str, mask: str) -> None:
    """The mean of the tokens that are no padding, of length 1."""
    kept = graph.op("Mul", x, graph.op("Unsqueeze", mask, np.int64([2])))
    total = graph.op("ReduceSum", kept, np.int64([1]), keepdims=0)
    mean = graph.op("Div", total, graph.op("ReduceSum", mask, np.int64([1]), keepdims=1))
    graph.op("LpNormalization", mean, to="embedding", axis=1, p=2)


def _save(graph: Emitter, path: Path) -> None:
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["rows", WIDTH])
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in graph.constants.items()]
    model = helper.make_graph(graph.nodes, "minilm", inputs, [output], constants)
    onnx.save(helper.make_model(model, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
