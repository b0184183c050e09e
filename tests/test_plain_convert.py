"""`dskquant convert` and `inspect` of plain graphs: real ones, compared with ONNX Runtime called directly and with
noise computed in numpy, and what is refused.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.plain_models import (
    DETECTOR,
    MAGIKA,
    RECOGNIZER,
    VOICE,
    Arrays,
    direct_answers,
    files,
    lines,
    pages,
    present,
    saved,
    sounds,
)

from dskquant.cli import main
from dskquant.modes import PrecisionMode
from dskquant.plain.protocol import TensorSpec
from dskquant.plain.store import PlainManifest, read_golden
from dskquant.store import file_sha256

FP32, FP16, INT8, INT4 = PrecisionMode.FP32, PrecisionMode.FP16, PrecisionMode.INT8, PrecisionMode.INT4
SOURCES: dict[str, tuple[Path, Callable[[], Arrays]]] = {
    "detector": (DETECTOR, lambda: pages(5)),
    "recognizer": (RECOGNIZER, lambda: lines(5)),
    "magika": (MAGIKA, lambda: files(12)),
}


class Converted:
    """A store that was made by the command, with its data."""

    def __init__(self, name: str, directory: Path) -> None:
        source, data = SOURCES[name]
        self.source, self.data, self.store = present(source), data(), directory / name
        arguments = ["--data", str(saved(directory / f"{name}.npz", self.data)), "--quiet", "--min-sqnr", "5"]
        assert main(["convert", str(self.source), "-o", str(self.store), *arguments]) == 0
        self.manifest = PlainManifest.read(self.store)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """The store of each of SOURCES, made when it is first asked for."""
    return functools.cache(lambda name: Converted(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=list(SOURCES))
def converted(request: pytest.FixtureRequest, stores: Callable[[str], Converted]) -> Converted:
    return stores(request.param)


@pytest.fixture
def detector(stores: Callable[[str], Converted]) -> Converted:
    return stores("detector")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a command that is refused."""
    assert main([str(argument) for argument in arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_fp32_is_the_file_and_answers_what_onnxruntime_answers(converted: Converted) -> None:
    fp32 = converted.store / "fp32.onnx"
    assert fp32.read_bytes() == converted.source.read_bytes()
    assert converted.manifest.source_sha256 == file_sha256(converted.source)
    golden = read_golden(converted.store)
    for name, rows in golden.inputs.items():
        np.testing.assert_array_equal(rows, converted.data[name][:4])
    session = onnxruntime.InferenceSession(converted.source)
    names = [output.name for output in session.get_outputs()]
    for name, expected in zip(names, session.run(names, dict(golden.inputs)), strict=True):
        np.testing.assert_array_equal(golden.outputs[name], expected)


def test_the_noise_of_each_mode_is_what_numpy_computes(converted: Converted) -> None:
    reference = direct_answers(converted.source, converted.data)
    measured = converted.manifest.graphs.keys() - {FP32}
    assert measured >= {FP16, INT8}
    for mode in measured:
        graph = converted.manifest.graphs[mode]
        assert graph.noise is not None
        answers = direct_answers(converted.store / graph.file, converted.data)
        r, a = (
            np.concatenate([np.float64(next(iter(answer.values()))) for answer in each])
            for each in (reference, answers)
        )
        assert graph.noise.sqnr_db == pytest.approx(10 * np.log10((r**2).sum() / ((r - a) ** 2).sum()), abs=1e-4)
        flat_r, flat_a = r.reshape(len(r), -1), a.reshape(len(a), -1)
        lengths = np.linalg.norm(flat_r, axis=1) * np.linalg.norm(flat_a, axis=1)
        assert graph.noise.cosine == pytest.approx(np.mean((flat_r * flat_a).sum(1) / lengths), abs=1e-6)
        top1 = (r.argmax(1) == a.argmax(1)).mean() if r.ndim == 2 else None
        assert graph.noise.top1 == top1


def test_manifest_and_files_agree(converted: Converted) -> None:
    session = onnxruntime.InferenceSession(converted.source)
    assert [spec.name for spec in converted.manifest.inputs] == [each.name for each in session.get_inputs()]
    assert [spec.name for spec in converted.manifest.outputs] == [each.name for each in session.get_outputs()]
    assert converted.manifest.batch_axis == 0
    for graph in converted.manifest.graphs.values():
        path = converted.store / graph.file
        assert (graph.sha256, graph.nbytes) == (file_sha256(path), path.stat().st_size)
    assert converted.manifest.calibration.source == f"{converted.store.name}.npz"


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_convolutions_become_int8_per_channel(detector: Converted) -> None:
    """From an opset that has no quantization per channel."""
    assert onnx.load(DETECTOR).opset_import[0].version == 12
    graph = onnx.load(detector.store / "int8.onnx").graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    weights = [producers[node.input[1]] for node in graph.node if node.op_type == "Conv"]
    assert len(weights) == 62
    for node in weights:
        assert node.op_type == "DequantizeLinear"
        codes, scales = constants[node.input[0]], constants[node.input[1]]
        assert codes.dtype == np.int8
        assert scales.shape == (codes.shape[0],)


def test_matrix_products_become_blocks_of_four_bits(stores: Callable[[str], Converted]) -> None:
    made = stores("recognizer")
    assert operators(made.store / "int4.onnx")["MatMulNBits"] == 9
    assert made.manifest.graphs[INT4].nbytes < made.manifest.graphs[FP32].nbytes


def test_layers_can_be_kept_in_float(detector: Converted, tmp_path: Path) -> None:
    data = saved(tmp_path / "pages.npz", detector.data)
    store = tmp_path / "mixed"
    arguments = ["-o", store, "--data", data, "--modes", "int8", "--keep-float", "p2o.Conv.0,p2o.Conv.1", "--quiet"]
    assert main(list(map(str, ["convert", DETECTOR, *arguments]))) == 0
    graph = onnx.load(store / "int8.onnx").graph
    produced = {output for node in graph.node if node.op_type == "DequantizeLinear" for output in node.output}
    in_float = {node.name for node in graph.node if node.op_type == "Conv" and node.input[1] not in produced}
    assert in_float == {"p2o.Conv.0", "p2o.Conv.1"}
    stored = PlainManifest.read(store).graphs[INT8]
    assert stored.method == "static QDQ, 2 layers in float"


def test_a_graph_in_branches_keeps_to_float_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, store = saved(tmp_path / "sounds.npz", sounds(3)), tmp_path / "voice"
    assert main(["convert", str(present(VOICE)), "-o", str(store), "--data", str(data), "--quiet"]) == 0
    notes = capsys.readouterr().err
    assert "int8 was not made" in notes
    assert "none outside of branches and loops" in notes
    manifest = PlainManifest.read(store)
    assert manifest.graphs.keys() == {FP32, FP16}
    assert manifest.batch_axis is None
    golden = read_golden(store)
    outputs = onnxruntime.InferenceSession(VOICE).run(["output", "stateN"], dict(golden.inputs))
    np.testing.assert_array_equal(golden.outputs["output"], outputs[0])
    line = refused(capsys, "convert", VOICE, "-o", tmp_path / "int8", "--data", data, "--modes", "int8", "--quiet")
    assert line.startswith("dskquant convert: int8: ")
    assert not (tmp_path / "int8").exists()


def test_random_inputs_are_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "magika"
    assert main(["convert", str(MAGIKA), "-o", str(store), "--random-data", "--rows", "3", "--modes", "fp16"]) == 0
    out, err = capsys.readouterr()
    assert "3 rows of random inputs, which say little" in out
    assert "note: calibrated and measured on random inputs" in err
    assert PlainManifest.read(store).calibration.is_random
    assert main(["inspect", str(store)]) == 0
    assert "3 rows of random inputs, which say little" in capsys.readouterr().out


def test_external_data_is_brought_into_one_file(tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "magika.onnx"
    outside.parent.mkdir()
    onnx.save(onnx.load(MAGIKA), outside, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    assert (outside.parent / "weights.bin").stat().st_size > 1 << 20
    data, store = saved(tmp_path / "files.npz", files(4)), tmp_path / "store"
    arguments = ["-o", str(store), "--data", str(data), "--modes", "int8", "--quiet"]
    assert main(["convert", str(outside), *arguments]) == 0
    shutil.rmtree(outside.parent)
    expected, found = (direct_answers(path, files(4)) for path in (MAGIKA, store / "fp32.onnx"))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one["target_label"], other["target_label"])


def graph_file(path: Path, *nodes: onnx.NodeProto, shape: list[Any] | None, **constants: NDArray[Any]) -> Path:
    """y of `shape` from x of [rows, 8]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(list(nodes), "graph", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


SQUARE = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
EIGHTS = {"x": np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)}


@pytest.mark.parametrize(("axis", "batch_axis"), [(0, None), (1, 0)])
def test_a_batch_axis_is_one_only_where_rows_do_not_mix(tmp_path: Path, axis: int, batch_axis: int | None) -> None:
    nodes = helper.make_node("MatMul", ["x", "w"], ["s"]), helper.make_node("Softmax", ["s"], ["y"], axis=axis)
    path = graph_file(tmp_path / "soft.onnx", *nodes, shape=["rows", 8], w=SQUARE)
    data, store = saved(tmp_path / "data.npz", EIGHTS), tmp_path / "store"
    assert main(["convert", str(path), "-o", str(store), "--data", str(data), "--quiet", "--modes", "fp16"]) == 0
    manifest = PlainManifest.read(store)
    assert manifest.batch_axis == batch_axis
    assert manifest.inputs == (TensorSpec("x", np.dtype(np.float32), (None, 8)),)


def test_a_rank_that_only_running_tells_is_found_by_running(tmp_path: Path) -> None:
    """The shape is computed from a sum of the input, so that no engine can tell its rank."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["indices"]),
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("Slice", ["size", "zero", "count"], ["wanted"]),
        helper.make_node("Reshape", ["x", "wanted"], ["y"]),
        helper.make_node("Shape", ["indices"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["count"]),
    ]
    nodes = [nodes[0], nodes[4], nodes[5], nodes[1], nodes[2], nodes[3]]
    path = graph_file(tmp_path / "g.onnx", *nodes, shape=None, zero=np.int64([0]))
    data, store = saved(tmp_path / "data.npz", EIGHTS), tmp_path / "store"
    assert main(["convert", str(path), "-o", str(store), "--data", str(data), "--quiet", "--modes", "fp16"]) == 0
    assert PlainManifest.read(store).outputs == (TensorSpec("y", np.dtype(np.float32), (None, None)),)
    assert read_golden(store).outputs["y"].shape == (1, 8)


def test_an_opset_from_the_future_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = graph_file(tmp_path / "g.onnx", helper.make_node("Abs", ["x"], ["y"]), shape=["rows", 8])
    model = onnx.load(path)
    model.opset_import[0].version = 99
    onnx.save(model, path)
    assert main(["convert", str(path), "-o", str(tmp_path / "s"), "--random-data", "--quiet"]) == 1
    assert "g.onnx" in capsys.readouterr().err


def test_answers_that_are_not_finite_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = graph_file(tmp_path / "log.onnx", helper.make_node("Log", ["x"], ["y"]), shape=["rows", 8])
    line = refused(
        capsys, "convert", path, "-o", tmp_path / "s", "--data", saved(tmp_path / "d.npz", EIGHTS), "--quiet"
    )
    assert line.endswith("the graph as it was given: y: has values that are not finite")


def test_a_mode_that_is_too_noisy_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = graph_file(tmp_path / "g.onnx", helper.make_node("MatMul", ["x", "w"], ["y"]), shape=["rows", 8], w=SQUARE)
    arguments = ("convert", path, "-o", tmp_path / "s", "--data", saved(tmp_path / "d.npz", EIGHTS), "--quiet")
    line = refused(capsys, *arguments, "--modes", "int4", "--min-sqnr", "60")
    assert "int4: too noisy: " in line
    assert line.endswith(" dB on the data, where --min-sqnr asks for 60")
    assert not (tmp_path / "s").exists()


X = EIGHTS["x"]
BAD_DATA: list[tuple[Arrays, str]] = [
    ({"z": X}, "z: no such input; known: x"),
    ({}, "x: is missing"),
    ({"x": X.astype(np.float64)}, "x: float64 is not allowed; allowed: float32"),
    ({"x": X[:, :7]}, "x: shape [1, 7] is not allowed; allowed: [any, 8]"),
    ({"x": X[0]}, "x: shape [8] is not allowed; allowed: [rows, 8] or [rows, any, 8]"),
    ({"x": X[:0]}, "x: has no rows"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_DATA)
def test_data_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrays: Arrays, message: str
) -> None:
    path = graph_file(tmp_path / "g.onnx", helper.make_node("MatMul", ["x", "w"], ["y"]), shape=["rows", 8], w=SQUARE)
    data = saved(tmp_path / "data.npz", arrays)
    line = refused(capsys, "convert", path, "-o", tmp_path / "s", "--data", data, "--quiet")
    assert line == f"dskquant convert: {data}: {message}"


REFUSED: list[tuple[tuple[str, ...], str]] = [
    ((), "inputs to calibrate and to measure with are needed: --data INPUTS.npz, or --random-data"),
    (("--data", "d.npz", "--random-data"), "--data and --random-data exclude each other"),
    (("--data", "nothing.npz"), "nothing.npz: missing"),
    (("--data", "bad.npz"), "bad.npz: damaged, or no .npz file"),
    (("--data", "text.txt"), "text.txt: not an .npz file"),
    (("--random-data", "--symmetric"), "--symmetric is not for graphs that are no language models"),
    (("--random-data", "--keep-float", "a*"), "no layer to keep in float matches 'a*'; there are MatMul#0 and so on"),
    (("--random-data", "--modes", "int8", "--keep-float", "*"), "all of them are kept in float"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_usage_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    graph_file(Path("g.onnx"), helper.make_node("MatMul", ["x", "w"], ["y"]), shape=["rows", 8], w=SQUARE)
    Path("bad.npz").write_bytes(b"PK")
    Path("text.txt").write_text("no data")
    assert message in refused(capsys, "convert", "g.onnx", "-o", "store", "--quiet", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.npz", "g.onnx", "text.txt"]


@pytest.mark.parametrize("content", [b"no graph", b""])
def test_what_is_no_graph_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    for name, message in (("g.onnx", "no ONNX graph"), ("g.xml", "no OpenVINO IR that can be read")):
        (tmp_path / name).write_bytes(content)
        assert main(["convert", str(tmp_path / name), "-o", str(tmp_path / "s"), "--random-data", "--quiet"]) == 1
        assert message in capsys.readouterr().err  # the engine writes there too
    missing = tmp_path / "missing.onnx"
    assert "missing.onnx: no such file" in refused(capsys, "convert", missing, "-o", tmp_path / "s", "--random-data")


def test_an_option_for_graphs_is_refused_for_language_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "convert", "m.gguf", "-o", "s", "--int8", "static").endswith("is not for language models")


def test_a_store_is_replaced_only_when_asked_for(detector: Converted, capsys: pytest.CaptureFixture[str]) -> None:
    before = (detector.store / "manifest.json").read_bytes()
    line = refused(capsys, "convert", MAGIKA, "-o", detector.store, "--random-data")
    assert line.endswith("exists already; --force replaces it")
    assert (detector.store / "manifest.json").read_bytes() == before


def test_inspect_tells_modes_and_noise(
    detector: Converted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect", str(detector.store), "--verify"]) == 0
    out = capsys.readouterr().out
    for mode, graph in detector.manifest.graphs.items():
        (row,) = (line for line in out.splitlines() if line.startswith(f"│ {mode.value} "))
        assert f"{graph.nbytes:,}" in row
        assert graph.noise is None or f" {graph.noise.sqnr_db:.1f} " in row
    assert out.count("whole") == len(detector.manifest.graphs)
    assert main(["inspect", str(detector.store / "manifest.json"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["manifest"] == json.loads((detector.store / "manifest.json").read_text())


def test_inspect_names_what_is_damaged(detector: Converted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Path(shutil.copytree(detector.store, tmp_path / "damaged"))
    (store / "fp16.onnx").unlink()
    (store / "golden.npz").write_bytes(b"")
    content = bytearray((store / "int8.onnx").read_bytes())
    content[1000] ^= 1
    (store / "int8.onnx").write_bytes(content)
    line = refused(capsys, "inspect", store, "--verify", "--json")
    assert "fp16.onnx is missing; int8.onnx is damaged; " in line
    assert "golden.npz: damaged" in line


def test_an_ir_is_quantized_by_nncf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import openvino as ov

    ov.save_model(ov.convert_model(DETECTOR), tmp_path / "detector.xml", compress_to_fp16=False)
    data, store = pages(4), tmp_path / "store"
    arguments = ["-o", str(store), "--data", str(saved(tmp_path / "pages.npz", data)), "--quiet", "--json"]
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "detector.xml"), *arguments]) == 0
    manifest = PlainManifest.read(store)
    assert json.loads(capsys.readouterr().out)["graphs"].keys() == {"fp32", "fp16", "int8"}
    assert manifest.graphs.keys() == {FP32, FP16, INT8}
    assert manifest.graphs[INT8].nbytes < manifest.graphs[FP16].nbytes < manifest.graphs[FP32].nbytes
    answers = []
    for mode in (FP32, INT8):
        manifest.graphs[mode].verify(store)
        model = ov.compile_model(store / manifest.graphs[mode].file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        answers.append(np.concatenate([np.float64(model([data["x"][row : row + 1]])[0]) for row in range(4)]))
    noise = 10 * np.log10((answers[0] ** 2).sum() / ((answers[0] - answers[1]) ** 2).sum())
    assert manifest.graphs[INT8].noise is not None
    assert manifest.graphs[INT8].noise.sqnr_db == pytest.approx(noise, abs=1e-3)
