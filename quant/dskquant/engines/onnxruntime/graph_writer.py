"""Writes an ONNX graph node by node; large constants stay where they are and are handed over beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 21
CONTRIB = "com.microsoft"
IR_VERSION = 10
BESIDE = "beside"  # the file that external constants claim to be in; it is never opened

ELEMENT_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
}

Dimension = str | int


class GraphWriter:
    """A graph under construction. Values are known by their names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self.beside: dict[str, NDArray[Any]] = {}  # the large constants

    def input(self, name: str, element_type: int, shape: Sequence[Dimension]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))
        return name

    def output(self, name: str, element_type: int, shape: Sequence[Dimension]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))

    def node(self, operator: str, inputs: Sequence[str], *, domain: str = "", name: str = "", **attributes: Any) -> str:
        """Adds a node with one output, called `name`; returns the name."""
        (output,) = self.nodes(operator, inputs, [name or f"v{len(self._nodes)}"], domain=domain, **attributes)
        return output

    def nodes(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> Sequence[str]:
        """Adds a node with these outputs; an empty name leaves one out."""
        name = f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, outputs, name, domain=domain, **attributes))
        return outputs

    def split(self, value: str, sizes: Sequence[int]) -> Sequence[str]:
        """Pieces of these sizes along the last axis."""
        outputs = [f"{value}.{index}" for index in range(len(sizes))]
        return self.nodes("Split", [value, self.integers(*sizes)], outputs, axis=-1)

    def integers(self, *values: int) -> str:
        """A small constant [n] of int64, stored in the graph."""
        name = "i" + "_".join(map(str, values))
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.array(values, np.int64), name)
        return name

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """A large constant, not copied: it is handed over beside the graph."""
        if name not in self._constants:
            kind = ELEMENT_TYPES[values.dtype]
            tensor = TensorProto(name=name, dims=values.shape, data_type=kind, data_location=TensorProto.EXTERNAL)
            tensor.external_data.add(key="location", value=BESIDE)
            self._constants[name] = tensor
            self.beside[name] = values
        return name

    def serialized(self) -> bytes:
        """The model without the constants that lie beside it."""
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, list(self._constants.values()))
        domains = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION)
        return bytes(model.SerializeToString())
