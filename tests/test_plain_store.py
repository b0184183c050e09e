"""The store of a plain graph: what is written is read again, and damage is refused by the name of file and field."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dskquant.errors import StoreError
from dskquant.modes import PrecisionMode
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import TensorSpec
from dskquant.plain.store import (
    CalibrationData,
    PlainGolden,
    PlainManifest,
    StoredGraph,
    is_plain_store,
    read_golden,
    write_golden,
)

FLOAT32 = np.dtype(np.float32)
ROWS = PlainGolden({"x": np.ones((2, 3), np.float32)}, {"y": np.zeros((2, 4), np.float32)})
FILES = {"fp32.xml": b"<net/>", "fp32.bin": b"weights", "int8.onnx": b"quantized"}


def stored(*files: str, noise: GraphNoise | None = None) -> StoredGraph:
    content = b"".join(FILES[file] for file in files)
    return StoredGraph(files[0], hashlib.sha256(content).hexdigest(), len(content), "as given", noise)


MANIFEST = PlainManifest(
    name="scaled",
    source_sha256=64 * "a",
    batch_axis=0,
    inputs=(TensorSpec("x", FLOAT32, (None, 3)),),
    outputs=(TensorSpec("y", FLOAT32, (None, None)),),
    graphs={
        PrecisionMode.FP32: stored("fp32.xml", "fp32.bin"),
        PrecisionMode.INT8: stored("int8.onnx", noise=GraphNoise(31.5, 0.999, 0.75)),
    },
    calibration=CalibrationData("inputs.npz", 2),
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    MANIFEST.write(tmp_path)
    write_golden(tmp_path, ROWS)
    return tmp_path


def change(store: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = store / "manifest.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def test_what_was_written_is_read(store: Path) -> None:
    assert is_plain_store(store)
    assert PlainManifest.read(store) == MANIFEST
    golden = read_golden(store)
    np.testing.assert_array_equal(golden.inputs["x"], ROWS.inputs["x"])
    np.testing.assert_array_equal(golden.outputs["y"], ROWS.outputs["y"])
    for graph in MANIFEST.graphs.values():
        graph.verify(store)


def test_other_directories_are_no_plain_stores(tmp_path: Path) -> None:
    assert not is_plain_store(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 1}')
    assert not is_plain_store(tmp_path)
    with pytest.raises(StoreError, match=r"manifest\.json: format is missing"):
        PlainManifest.read(tmp_path)


@pytest.mark.parametrize("name", ["fp32.xml", "fp32.bin"])
def test_both_files_of_an_ir_are_verified(store: Path, name: str) -> None:
    (store / name).write_bytes(FILES[name][::-1])
    with pytest.raises(StoreError, match=r"fp32\.xml: damaged"):
        MANIFEST.graphs[PrecisionMode.FP32].verify(store)
    (store / name).unlink()
    with pytest.raises(StoreError, match=f"{name}: missing"):
        MANIFEST.graphs[PrecisionMode.FP32].verify(store)


def put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def edit(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = value

    return edit


DAMAGE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (put(2, "version"), "version is 2; allowed: 1"),
    (put(True, "version"), "version is True; allowed: 1"),
    (put(1, "extra"), "extra is unknown; known: format, "),
    (lambda raw: raw.pop("inputs"), "inputs is missing"),
    (put("", "name"), "name must be a text of 1 to 1000 characters"),
    (put("\ud800", "name"), "name must be a text"),
    (put(64 * "z", "source_sha256"), "source_sha256 must be 64 hexadecimal digits"),
    (put(1, "batch_axis"), "batch_axis is 1; allowed: 0, null"),
    (put([], "inputs"), "inputs must be a list of 1 to 1024 tables"),
    (put(["x"], "inputs"), "inputs[0] must be a table"),
    (put("string", "inputs", 0, "dtype"), "inputs[0].dtype is 'string'; allowed: "),
    (put([None, 0], "inputs", 0, "shape"), "inputs[0].shape has 0; allowed: null or a number from 1"),
    (put([1] * 17, "outputs", 0, "shape"), "outputs[0].shape must be a list of at most 16 sizes"),
    (lambda raw: raw["inputs"].append(raw["inputs"][0]), "inputs must have different names"),
    (put({}, "graphs", "int2"), "graphs.int2 is no precision mode; known: int4, int8, fp16, fp32"),
    (lambda raw: raw["graphs"].pop("fp32"), "graphs.fp32 is missing"),
    (put("../int8.onnx", "graphs", "int8", "file"), "graphs.int8.file is '../int8.onnx'; allowed: "),
    (put(0, "graphs", "int8", "nbytes"), "graphs.int8.nbytes must be a whole number from 1"),
    (put(1.5, "graphs", "int8", "nbytes"), "graphs.int8.nbytes must be a whole number from 1"),
    (put(None, "graphs", "int8", "noise"), "graphs.int8.noise must be a table"),
    (put({}, "graphs", "fp32", "noise"), "graphs.fp32.noise is {}; allowed: null"),
    (put(float("nan"), "graphs", "int8", "noise", "sqnr_db"), "graphs.int8.noise.sqnr_db must be a number from -200"),
    (put(1e308, "graphs", "int8", "noise", "cosine"), "graphs.int8.noise.cosine must be a number from -1 to 1"),
    (put(1.1, "graphs", "int8", "noise", "top1"), "graphs.int8.noise.top1 must be a number from 0 to 1"),
    (put(0, "calibration", "rows"), "calibration.rows must be a whole number from 1"),
]


@pytest.mark.parametrize(("edit", "message"), DAMAGE, ids=[message.partition(" ")[0] for _, message in DAMAGE])
def test_damaged_manifests_are_refused_by_field(
    store: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    change(store, edit)
    with pytest.raises(StoreError) as refused:
        PlainManifest.read(store)
    assert str(refused.value).startswith(f"{store / 'manifest.json'}: {message}")


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff", b" " * (2 << 20) + b"{}"])
def test_what_is_no_json_table_is_refused(store: Path, content: bytes) -> None:
    (store / "manifest.json").write_bytes(content)
    assert not is_plain_store(store)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        PlainManifest.read(store)


def golden_of(**arrays: np.ndarray[Any, Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **arrays)

    return write


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in.x.npy", bytes(257 << 20))


X, Y = ROWS.inputs["x"], ROWS.outputs["y"]
BAD_GOLDEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path.unlink(), "missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
    (lambda path: path.write_bytes(b""), "damaged"),
    (bomb, "unpacks to more than 256 MiB"),
    (golden_of(x=X), "has arrays that are neither"),
    (golden_of(**{"in.x": X}), "y: is missing"),
    (golden_of(**{"in.x": X, "out.y": Y.astype(np.float64)}), "y: float64 is not allowed"),
    (golden_of(**{"in.x": X, "out.y": Y[:1]}), "its arrays have different numbers of rows: 1, 2"),
    (
        golden_of(**{"in.x": np.array([object()]), "out.y": Y}),
        "damaged, or no .npz file: Object arrays cannot be loaded",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BAD_GOLDEN, ids=[message for _, message in BAD_GOLDEN])
def test_damaged_golden_inputs_are_refused(store: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(store / "golden.npz")
    with pytest.raises(StoreError) as refused:
        read_golden(store)
    assert str(refused.value).startswith(f"{store / 'golden.npz'}: {message}")
