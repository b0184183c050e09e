"""Plain graphs on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dskquant.engines.onnxruntime.session import PROVIDER, session_options
from dskquant.errors import EngineError
from dskquant.plain.protocol import Tensors, TensorSpec, check_tensors

DTYPES = {
    "tensor(bool)": np.bool_,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
}


class OnnxRuntimePlainGraph:
    """The graph of an ONNX file."""

    def __init__(self, path: Path, threads: int) -> None:
        try:
            self._session = ort.InferenceSession(path, session_options(threads), [PROVIDER])
        except Exception as error:  # the library has a dozen unrelated types for it
            raise EngineError(f"ONNX Runtime cannot load {path}: {error}") from error
        self.inputs = tuple(map(_spec, self._session.get_inputs()))
        self.outputs = tuple(map(_spec, self._session.get_outputs()))

    def run(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        check_tensors(self.inputs, tensors)
        names = [spec.name for spec in self.outputs]
        try:
            return dict(zip(names, self._session.run(names, dict(tensors)), strict=True))
        except Exception as error:  # as above
            raise EngineError(f"ONNX Runtime: {error}") from error


def _spec(port: ort.NodeArg) -> TensorSpec:
    """Names of dimensions, which ONNX has where a size is open, are left out."""
    if port.type not in DTYPES:
        raise EngineError(f"{port.name}: {port.type} is not supported")
    shape = tuple(size if isinstance(size, int) else None for size in port.shape)
    return TensorSpec(port.name, np.dtype(DTYPES[port.type]), shape)
