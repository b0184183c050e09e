"""`dskquant recommend`: on a graph whose noisy layer is known, on a real detector, and advice from given figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.plain_models import DETECTOR, direct_answers, pages, present, saved

from dskquant.cli import main
from dskquant.modes import PrecisionMode
from dskquant.plain.advice import Figures, advise
from dskquant.plain.maker import GraphKind, Layer
from dskquant.plain.noise import GraphNoise

WIDTH = 32


def outlier_graph(path: Path) -> Path:
    """Five products, of which the second writes one column 500 times as large as the others, and the third weights it
    with nothing: quantized, what lies between them loses all the bits that matter.
    """
    random = np.random.default_rng(0)
    weights = {f"w{n}": random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for n in range(5)}
    weights["w1"][:, 0] *= 500
    weights["w2"][0] = 0
    nodes = [
        helper.make_node("MatMul", [f"x{n}" if n else "x", f"w{n}"], [f"x{n + 1}" if n < 4 else "y"], name=f"layer{n}")
        for n in range(5)
    ]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1, WIDTH]) for name in ("x", "y")]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "outlier", tensors[:1], tensors[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def recommended(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["recommend", *map(str, arguments), "--json", "--quiet"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def sqnr_db(reference: list[dict[str, NDArray[Any]]], answers: list[dict[str, NDArray[Any]]]) -> float:
    r, a = (np.concatenate([np.float64(each["y"]) for each in all_]) for all_ in (reference, answers))
    return float(10 * np.log10((r**2).sum() / ((r - a) ** 2).sum()))


def test_the_layers_that_make_the_noise_are_found_and_left_in_float(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = outlier_graph(tmp_path / "g.onnx")
    arrays = {"x": np.random.default_rng(1).standard_normal((16, 1, WIDTH)).astype(np.float32)}
    data = saved(tmp_path / "data.npz", arrays)
    report = recommended(capsys, path, "--data", data)
    noise = {group["layers"][0]: group["sqnr_db"] for group in report["sensitivity"]}
    assert list(noise) == [f"layer{n}" for n in range(5)]
    assert {name for name, db in noise.items() if db < 20} == {"layer1", "layer2"}
    assert report["keep_float"] == ["layer1", "layer2"]
    (mixed,) = (each for each in report["modes"] if each["name"] == "int8, mixed" and each["engine"] == "onnxruntime")
    assert mixed["noise"]["sqnr_db"] >= 20
    arguments = ["--data", str(data), "--keep-float", ",".join(report["keep_float"]), "--modes", "int8", "--quiet"]
    assert main(["convert", str(path), "-o", str(tmp_path / "store"), *arguments]) == 0
    made = direct_answers(tmp_path / "store" / "int8.onnx", arrays)
    assert sqnr_db(direct_answers(path, arrays), made) == pytest.approx(mixed["noise"]["sqnr_db"], abs=1e-3)


def test_a_real_detector_is_measured_on_both_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = saved(tmp_path / "pages.npz", pages(2, size=96))
    report = recommended(capsys, present(DETECTOR), "--data", data)
    assert (report["kind"], report["layers"], report["operators"]["Conv"]) == ("convolutional", 62, 62)
    measured = {(each["name"], each["engine"]) for each in report["modes"]}
    assert measured >= {(mode, engine) for mode in ("fp32", "fp16", "int8") for engine in ("onnxruntime", "openvino")}
    assert all(each["ms"] > 0 for each in report["modes"])
    exact = {each["engine"]: each["noise"]["sqnr_db"] for each in report["modes"] if each["name"] == "fp32"}
    assert exact["onnxruntime"] == 200
    assert exact["openvino"] > 80
    assert sum(len(group["layers"]) for group in report["sensitivity"]) == 62
    assert any(note.startswith("int4 was not made: ") for note in report["notes"])


def test_a_store_is_measured_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = outlier_graph(tmp_path / "g.onnx")
    data = saved(
        tmp_path / "data.npz", {"x": np.random.default_rng(1).standard_normal((6, 1, WIDTH)).astype(np.float32)}
    )
    store = tmp_path / "store"
    assert main(["convert", str(path), "-o", str(store), "--data", str(data), "--modes", "fp16", "--quiet"]) == 0
    before = sorted(path.name for path in store.iterdir())
    capsys.readouterr()
    assert main(["recommend", str(store), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "on 4 rows of golden.npz" in out
    assert "│ fp16 " in out
    assert "│ int8 " not in out
    assert sorted(path.name for path in store.iterdir()) == before


@pytest.mark.parametrize("name", ["missing", "model.gguf"])
def test_what_is_no_graph_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["recommend", str(tmp_path / name), "--quiet"]) == 1
    assert "neither an ONNX file, nor the .xml of an IR, nor the store of such a graph" in capsys.readouterr().err


LAYERS = [Layer("a", "Conv", 10), Layer("b", "Conv", 10), Layer("c", "MatMul", 10)]
EXACT, GOOD, BAD = GraphNoise(200, 1, 1), GraphNoise(30, 0.999, 1), GraphNoise(5, 0.8, 0.5)
FP32 = Figures("fp32", PrecisionMode.FP32, "openvino", "as given", 100, EXACT, 10.0)
INT8 = Figures("int8", PrecisionMode.INT8, "openvino", "static QDQ", 30, GOOD, 4.0)
CASES: list[tuple[list[Figures], str, str]] = [
    ([FP32, INT8], "int8", "int8: 2.50 times as fast as FP32 (openvino), 30% of its size, 30.0 dB: exact enough"),
    ([FP32, replace(INT8, noise=BAD)], "fp32", "5.0 dB: too noisy (wanted: 20 dB)"),
    (
        [FP32, replace(INT8, noise=GraphNoise(30, 1, 0.9))],
        "int8",
        "exact enough, though the top-1 of 90.0% of the rows",
    ),
    ([FP32, replace(INT8, ms=9.5)], "fp32", "no mode that is exact enough is 1.1 times as fast"),
    (
        [FP32, INT8, replace(INT8, engine="onnxruntime", noise=BAD)],
        "int8",
        "int8: onnxruntime computes it with 5.0 dB where openvino has 30.0 dB: do not serve it there",
    ),
    ([replace(FP32, ms=3.0, engine="onnxruntime"), FP32, INT8], "fp32", "serve FP32 on onnxruntime"),
]


@pytest.mark.parametrize(("figures", "best", "reason"), CASES, ids=[reason for _, _, reason in CASES])
def test_advice_follows_from_the_figures(figures: list[Figures], best: str, reason: str) -> None:
    advice = advise(GraphKind.CONVOLUTIONAL, LAYERS, figures, ())
    assert advice.best.name == best
    assert any(reason in each for each in advice.reasons)


def test_layers_to_keep_become_an_option_of_convert() -> None:
    advice = advise(GraphKind.CONVOLUTIONAL, LAYERS, [FP32, INT8], ("a", "c"))
    assert "leaving 2 of 3 layers in float makes INT8 exact enough: dskquant convert ... --keep-float 'a,c'" in (
        advice.reasons
    )
