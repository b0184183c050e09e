"""Plain graphs: what goes in and comes out, on both engines, and that both compute the same as ONNX Runtime alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from dskquant.errors import EngineError, TensorError
from dskquant.plain.load import PLAIN_ENGINE_NAMES, load_plain_graph
from dskquant.plain.protocol import PlainGraph, TensorSpec

MAGIKA = Path(__file__).parents[1] / ".cache" / "magika.onnx"
ROUNDING = 2e-4
"""Of probabilities, between two engines that compute in float32."""

BATCH_ROUNDING = 1e-2
"""The same between a row alone and in a batch. ONNX Runtime adds up the values of a batch in another order, and this
graph computes variances as differences of two sums, which magnifies that (seen: 3e-3)."""

Graphs = dict[str, PlainGraph]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """y = x * factor and size = shape(x), with x of any number of rows, by engine."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 3])
    factor = helper.make_tensor_value_info("factor", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 3])
    size = helper.make_tensor_value_info("size", TensorProto.INT64, [2])
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"]), helper.make_node("Shape", ["x"], ["size"])]
    graph = helper.make_graph(nodes, "scaled", [x, factor], [y, size])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path_factory.mktemp("plain") / "scaled.onnx"
    onnx.save(model, path)
    return {engine: load_plain_graph(engine, path, threads=1) for engine in PLAIN_ENGINE_NAMES}


@pytest.fixture(scope="module")
def magika() -> Graphs:
    if not MAGIKA.exists():
        pytest.fail(f"{MAGIKA} is missing; `make test` brings it")
    return {engine: load_plain_graph(engine, MAGIKA, threads=1) for engine in PLAIN_ENGINE_NAMES}


def content(rows: int) -> NDArray[np.int32]:
    """Beginnings and ends of files, padded as that model wants it; [rows, 2048]."""
    texts = [b"#!/bin/sh\necho hello\n", b"<html><body>x</body></html>", b"%PDF-1.7\n", bytes(range(256)) * 4]
    padded = np.full((rows, 2048), 256, np.int32)
    for row in range(rows):
        text = np.frombuffer(texts[row % len(texts)][:1024], np.uint8)
        padded[row, : len(text)] = text
        padded[row, 2048 - len(text) :] = text
    return padded


@pytest.mark.parametrize("engine", PLAIN_ENGINE_NAMES)
def test_a_graph_tells_its_tensors(scaled: Graphs, engine: str) -> None:
    float32, int64 = np.dtype(np.float32), np.dtype(np.int64)
    assert scaled[engine].inputs == (TensorSpec("x", float32, (None, 3)), TensorSpec("factor", float32, (3,)))
    assert scaled[engine].outputs == (TensorSpec("y", float32, (None, 3)), TensorSpec("size", int64, (2,)))


@given(rows=st.integers(1, 40), seed=st.integers(0, 9), transposed=st.booleans())
def test_both_engines_compute_batches_of_any_size(scaled: Graphs, rows: int, seed: int, transposed: bool) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((3, rows), np.float32).T if transposed else random.standard_normal((rows, 3), np.float32)
    factor = random.standard_normal(3, np.float32)
    for graph in scaled.values():
        results = graph.run({"factor": factor, "x": x})
        np.testing.assert_array_equal(results["y"], x * factor)
        assert results["size"].tolist() == [rows, 3]


@pytest.mark.parametrize("engine", PLAIN_ENGINE_NAMES)
def test_results_are_not_overwritten_by_the_next_run(scaled: Graphs, engine: str) -> None:
    ones = np.ones((2, 3), np.float32)
    first = scaled[engine].run({"x": ones, "factor": ones[0]})
    scaled[engine].run({"x": 5 * ones, "factor": ones[0]})
    np.testing.assert_array_equal(first["y"], ones)


X, FACTOR = np.ones((2, 3), np.float32), np.ones(3, np.float32)
WRONG_TENSORS: list[tuple[dict[str, NDArray[Any]], str, str]] = [
    ({"x": X}, "factor", "is missing"),
    ({"x": X, "factor": FACTOR, "z": X}, "z", "no such input; known: x, factor"),
    ({"x": X.astype(np.float64), "factor": FACTOR}, "x", "float64 is not allowed; allowed: float32"),
    ({"x": X.astype(">f4"), "factor": FACTOR}, "x", ">f4 is not allowed; allowed: float32"),
    ({"x": X, "factor": FACTOR[:2]}, "factor", "shape [2] is not allowed; allowed: [3]"),
    ({"x": X[0], "factor": FACTOR}, "x", "shape [3] is not allowed; allowed: [any, 3]"),
    ({"x": X[..., None], "factor": FACTOR}, "x", "shape [2, 3, 1] is not allowed; allowed: [any, 3]"),
]


@pytest.mark.parametrize("engine", PLAIN_ENGINE_NAMES)
@pytest.mark.parametrize(("tensors", "name", "description"), WRONG_TENSORS)
def test_wrong_tensors_are_named(
    scaled: Graphs, engine: str, tensors: dict[str, NDArray[Any]], name: str, description: str
) -> None:
    with pytest.raises(TensorError) as refused:
        scaled[engine].run(tensors)
    assert (refused.value.name, refused.value.description) == (name, description)


@pytest.mark.parametrize("engine", PLAIN_ENGINE_NAMES)
def test_what_is_no_model_is_refused(tmp_path: Path, engine: str) -> None:
    damaged = tmp_path / "model.onnx"
    damaged.write_bytes(b"no model")
    for path in (damaged, tmp_path / "nothing.onnx"):
        with pytest.raises(EngineError, match=path.name):
            load_plain_graph(engine, path, threads=1)


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown engine 'abacus'; known: onnxruntime, openvino"):
        load_plain_graph("abacus", tmp_path, threads=1)


def test_a_real_graph_computes_what_onnxruntime_computes(magika: Graphs) -> None:
    direct = onnxruntime.InferenceSession(MAGIKA)
    for rows in (1, 5):
        (expected,) = direct.run(["target_label"], {"bytes": content(rows)})
        np.testing.assert_array_equal(run(magika["onnxruntime"], content(rows)), expected)
    (expected,) = direct.run(["target_label"], {"bytes": content(1)})
    np.testing.assert_allclose(run(magika["openvino"], content(1)), expected, atol=ROUNDING)


@pytest.mark.parametrize("engine", PLAIN_ENGINE_NAMES)
def test_the_rows_of_a_batch_do_not_mix(magika: Graphs, engine: str) -> None:
    rows = content(4)
    batched = run(magika[engine], rows)
    single = np.concatenate([run(magika[engine], rows[row : row + 1]) for row in range(4)])
    np.testing.assert_allclose(batched, single, atol=BATCH_ROUNDING)
    assert len(set(single.argmax(axis=1))) == 4  # four kinds of files: an exchange would show


def run(graph: PlainGraph, content: NDArray[np.int32]) -> NDArray[np.float32]:
    return graph.run({"bytes": content})["target_label"]
