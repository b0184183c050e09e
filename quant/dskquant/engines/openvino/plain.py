"""Plain graphs on OpenVINO."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from dskquant.engines.openvino.core import CORE
from dskquant.errors import EngineError
from dskquant.plain.protocol import Tensors, TensorSpec, check_tensors

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
"""Otherwise a CPU with bfloat16 computes float32 graphs in that."""


class OpenVINOPlainGraph:
    """The graph of an ONNX file or an IR."""

    def __init__(self, path: Path, threads: int) -> None:
        try:
            model = CORE.read_model(path)
            compiled = CORE.compile_model(model, "CPU", {**EXACT, "INFERENCE_NUM_THREADS": threads})
            self._request = compiled.create_infer_request()
        except Exception as error:  # the library raises plain RuntimeErrors, and others for files it cannot find
            raise EngineError(f"OpenVINO cannot load {path}: {error}") from error
        self.inputs = tuple(map(_spec, compiled.inputs, _names(model.inputs)))
        self.outputs = tuple(map(_spec, compiled.outputs, _names(model.outputs)))

    def run(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        check_tensors(self.inputs, tensors)
        try:
            results = self._request.infer(dict(tensors))
        except Exception as error:  # as above
            raise EngineError(f"OpenVINO: {error}") from error
        # The results lie in memory of the request, which the next run writes again.
        return {spec.name: results[index].copy() for index, spec in enumerate(self.outputs)}


def _names(ports: Iterable[ov.Output]) -> list[str]:
    """Those of the file. Compiled, a port may have those of casts that were dropped too."""
    return [str(port.any_name) for port in ports]


def _spec(port: ov.ConstOutput, name: str) -> TensorSpec:
    if port.element_type == ov.Type.string:
        raise EngineError(f"{name}: tensors of strings are not supported")
    shape = tuple(None if size.is_dynamic else size.get_length() for size in port.partial_shape)
    return TensorSpec(name, np.dtype(port.element_type.to_dtype()), shape)
