"""Stores of plain graphs for tests: a tiny one whose modes can be told apart by value, and damaged ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from dskquant.modes import PrecisionMode
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import Tensors, TensorSpec
from dskquant.plain.store import CalibrationData, PlainGolden, PlainManifest, StoredGraph, write_golden
from dskquant.store import files_sha256

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
FACTORS = {INT4: 1.9, INT8: 1.99, FP32: 2.0}
"""What each mode of the tiny graph multiplies with: an answer tells its mode."""

SOURCE = "5" * 64


def scaling_graph(factor: float) -> onnx.ModelProto:
    """y = x * factor, of any number of rows of 3, and the same rows once more through a lookup: z = table[index]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 3])
    index = helper.make_tensor_value_info("index", TensorProto.INT64, ["rows", 1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 3])
    z = helper.make_tensor_value_info("z", TensorProto.INT64, ["rows", 1])
    constants = [
        numpy_helper.from_array(np.float32(factor), "factor"),
        numpy_helper.from_array(np.arange(100, dtype=np.int64) * 10, "table"),
    ]
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"]), helper.make_node("Gather", ["table", "index"], ["z"])]
    graph = helper.make_graph(nodes, "scaling", [x, index], [y, z], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def scaling_inputs(rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((rows, 3), np.float32), "index": random.integers(0, 100, (rows, 1))}


def scaling_store(directory: Path, factors: Mapping[PrecisionMode, float] = FACTORS) -> Path:
    """A store of the tiny graph, whose modes multiply with `factors`."""
    directory.mkdir(parents=True)
    for mode, factor in factors.items():
        onnx.save(scaling_graph(factor), directory / f"{mode.value}.onnx")
    return written(directory, scaling_inputs(8))


def with_damaged_int8(store: Path, directory: Path, strength: float = 1.0) -> Path:
    """A copy of `store` whose INT8 weights are another model's, nearly; its manifest tells nothing of that.

    `strength` is the noise in the weight matrices, relative to their standard deviation.
    """
    shutil.copytree(store, directory)
    model = onnx.load(directory / "fp32.onnx")
    random = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            values = numpy_helper.to_array(tensor)
            noise = random.standard_normal(values.shape, np.float32) * values.std() * np.float32(strength)
            tensor.CopyFrom(numpy_helper.from_array(values + noise, tensor.name))
    onnx.save(model, directory / "noisy.onnx")
    quantize_dynamic(directory / "noisy.onnx", directory / "int8.onnx", weight_type=QuantType.QInt8)
    (directory / "noisy.onnx").unlink()
    manifest = json.loads((directory / "manifest.json").read_text())
    found = directory / "int8.onnx"
    manifest["graphs"]["int8"] |= {"sha256": files_sha256([found]), "nbytes": found.stat().st_size}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def written(directory: Path, inputs: Tensors) -> Path:
    """Adds manifest and golden inputs to the graphs in `directory`."""
    specs = {path.stem: path for path in directory.glob("*.onnx")}
    answers = {name: direct(path, inputs) for name, path in specs.items()}
    session = onnxruntime.InferenceSession(specs["fp32"])
    manifest = PlainManifest(
        name="tiny",
        source_sha256=SOURCE,
        batch_axis=0,
        inputs=tuple(map(_spec, session.get_inputs())),
        outputs=tuple(map(_spec, session.get_outputs())),
        graphs={
            PrecisionMode(name): StoredGraph(
                path.name,
                files_sha256([path]),
                path.stat().st_size,
                "as given" if name == "fp32" else "made up",
                None if name == "fp32" else GraphNoise.between(answers["fp32"], answers[name]),
            )
            for name, path in specs.items()
        },
        calibration=CalibrationData("random", 8),
    )
    manifest.write(directory)
    write_golden(directory, PlainGolden(inputs, answers["fp32"]))
    return directory


def direct(path: Path, inputs: Tensors) -> dict[str, NDArray[Any]]:
    """What ONNX Runtime answers without us."""
    session = onnxruntime.InferenceSession(path)
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


_DTYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32"}


def _spec(port: onnxruntime.NodeArg) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else None for size in port.shape)
    return TensorSpec(port.name, np.dtype(_DTYPES[port.type]), shape)
