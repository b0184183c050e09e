"""What is in an ONNX decoder of the model builder of onnxruntime-genai: its weights by module, and its settings.

The builder names weights after the modules that they come from ("model.layers.0.mlp.up_proj.MatMul.weight"), may join
the projections of queries, keys and values, and writes quantized ones for `com.microsoft.MatMulNBits` (onnxruntime,
docs/ContribOperators.md). Tensors stay in the mapped file until their rows are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from dskquant.decoder import Shape
from dskquant.errors import SourceError
from dskquant.planes import unpack_u4

OPERATORS = {
    *("Add", "Cast", "Constant", "Gather", "GatherBlockQuantized", "GroupQueryAttention", "MatMul", "MatMulNBits"),
    *("Mul", "ReduceSum", "Reshape", "Shape", "Sigmoid", "SimplifiedLayerNormalization"),
    *("SkipSimplifiedLayerNormalization", "Split", "Sub", "Transpose"),
}
"""What decoders of the supported families are made of."""

NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
FLOATS = {onnx_ir.DataType.FLOAT: "f32", onnx_ir.DataType.FLOAT16: "f16", onnx_ir.DataType.BFLOAT16: "bf16"}
CODES: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {4: unpack_u4, 8: lambda codes: codes}
"""By bits: how to spell out packed codes, the first in the low half of a byte."""

MOST_INPUTS = 5
"""Of a MatMulNBits that are looked at: activations, codes, scales, zero-points, g_idx."""

Rows = Callable[[int, int], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [outputs, inputs] or a vector; `rows` reads from the first one to the one past the last."""

    shape: Shape
    dtype: str  # of what `rows` gives: "f16", "bf16" or "f32"
    rows: Rows

    def part(self, first: int, count: int) -> Weight:
        """`count` rows of it from `first` on."""
        return Weight((count, *self.shape[1:]), self.dtype, lambda start, stop: self.rows(first + start, first + stop))


class GenaiGraph:
    """Raises SourceError, naming the file and the node or tensor, for a graph that the builder does not write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._graph = _load(path)
        self._initializers: dict[str, onnx_ir.TensorProtocol] = {
            name: value.const_value for name, value in self._graph.initializers.items() if value.const_value is not None
        }
        self._check_operators()
        self.weights: dict[str, Weight] = dict(self._read_weights())

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as it lies in the file; bfloat16 as bit patterns."""
        tensor = self._initializers.get(name)
        if tensor is None:
            raise SourceError(f"{self.path}: tensor {name} is missing")
        self._check_place(name, tensor)
        try:
            values = tensor.numpy()
        except (OSError, ValueError) as error:
            raise SourceError(f"{self.path}: tensor {name} cannot be read: {error}") from error
        return values.view(np.uint16) if tensor.dtype is onnx_ir.DataType.BFLOAT16 else values

    def setting(self, operators: tuple[str, ...], attribute: str, default: float) -> float:
        """The value that `attribute` has in all nodes of these kinds. Raises SourceError where they differ."""
        nodes = [node for node in self._graph if node.op_type in operators]
        values = {_number(node, attribute, default) for node in nodes}
        if len(values) != 1:
            raise SourceError(f"{self.path}: {attribute} of {operators[0]}: must be one for all layers, not {values}")
        return values.pop()

    def _check_operators(self) -> None:
        unknown = sorted({node.op_type for node in self._graph} - OPERATORS)
        if unknown:
            raise SourceError(f"{self.path}: operators {', '.join(unknown)}; supported: {', '.join(sorted(OPERATORS))}")

    def _check_place(self, name: str, tensor: onnx_ir.TensorProtocol) -> None:
        if isinstance(tensor, onnx_ir.ExternalTensor) and Path(tensor.location).name != str(tensor.location):
            raise SourceError(f"{self.path}: tensor {name}: {tensor.location!s} is not a file beside it")

    def _read_weights(self) -> Iterator[tuple[str, Weight]]:
        """By the name of the module and "weight" or "bias"."""
        for node in self._graph:
            names = [value.name if value is not None else None for value in node.inputs]
            names += [None] * (MOST_INPUTS - len(names))
            if node.op_type == "MatMulNBits":
                yield _module(names[1]) + ".weight", self._quantized(node, names)
            elif node.op_type == "MatMul" and names[1] in self._initializers:
                yield _module(names[1]) + ".weight", self._transposed(str(names[1]))
        for name, tensor in self._initializers.items():
            if tensor.dtype in FLOATS and name.endswith((".bias", ".weight")) and ".MatMul." not in name:
                yield name.replace(".Add.bias", ".bias"), self._plain(name)

    def _plain(self, name: str) -> Weight:
        values = self.array(name)
        return Weight(values.shape, self._float(name), lambda first, last: values[first:last])

    def _transposed(self, name: str) -> Weight:
        values = self.array(name)
        if values.ndim != 2:
            raise SourceError(f"{self.path}: tensor {name}: shape {list(values.shape)}; a matrix is needed")
        inputs, outputs = values.shape
        return Weight(
            (outputs, inputs), self._float(name), lambda first, last: np.ascontiguousarray(values[:, first:last].T)
        )

    def _float(self, name: str) -> str:
        dtype = self._initializers[name].dtype
        if dtype not in FLOATS:
            raise SourceError(f"{self.path}: tensor {name}: dtype {dtype}; supported: {', '.join(FLOATS.values())}")
        return FLOATS[dtype]

    def _quantized(self, node: onnx_ir.Node, names: list[str | None]) -> Weight:
        outputs, inputs, bits, block = (int(_number(node, key, 0)) for key in ("N", "K", "bits", "block_size"))
        if bits not in CODES or names[4] or block < 16 or outputs < 1 or inputs < 1:
            raise SourceError(f"{self.path}: node {node.name}: only 4 or 8 bits in blocks without g_idx are supported")
        blocks = -(-inputs // block)
        codes = self._shaped(names[1], (outputs, blocks, block * bits // 8), np.uint8)
        scales = self._shaped(names[2], (outputs, blocks), None)
        points = self._shaped(names[3], (outputs, -(-blocks * bits // 8)), np.uint8) if names[3] else None

        def rows(first: int, last: int) -> NDArray[np.float32]:
            middle = np.float32(1 << (bits - 1))
            spelled = CODES[bits](codes[first:last]).astype(np.float32)
            zero = middle if points is None else CODES[bits](points[first:last])[:, :blocks, None].astype(np.float32)
            values = (spelled - zero) * scales[first:last, :, None].astype(np.float32)
            return np.ascontiguousarray(values.reshape(last - first, -1)[:, :inputs])

        return Weight((outputs, inputs), "f32", rows)

    def _shaped(self, name: str | None, shape: Shape, dtype: type[np.generic] | None) -> NDArray[Any]:
        """Tensor `name`, which may be flattened, in its proper shape; `dtype` None: a float."""
        values = self.array(str(name))
        is_right = np.issubdtype(values.dtype, np.floating) if dtype is None else values.dtype == dtype
        if not is_right or values.size != np.prod(shape):
            found = f"{values.dtype} {list(values.shape)}"
            raise SourceError(f"{self.path}: tensor {name}: {found}; {list(shape)} of its kind is needed")
        return values.reshape(shape)


def _load(path: Path) -> onnx_ir.Graph:
    try:
        return onnx_ir.load(path).graph
    except FileNotFoundError:
        raise SourceError(f"{path}: missing") from None
    except Exception as error:  # the parser raises what it likes for a damaged file
        raise SourceError(f"{path}: not a readable ONNX file: {error}") from error


def _module(name: str | None) -> str:
    return str(name).split(".MatMul.")[0]


def _number(node: onnx_ir.Node, attribute: str, default: float) -> float:
    found = node.attributes.get(attribute)
    return default if found is None else float(found.value)
