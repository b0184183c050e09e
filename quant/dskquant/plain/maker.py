"""What makes the modes of a plain graph: one maker for each kind of file, around the quantizers of its engine."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dskquant.errors import SourceError
from dskquant.modes import PrecisionMode
from dskquant.plain.protocol import Tensors

BLOCK_SIZES = (16, 32, 64, 128, 256)


class Int8Method(enum.Enum):
    """How the activations of INT8 are quantized; weights are, per channel, in both."""

    STATIC = "static"  # by ranges found on the calibration data
    DYNAMIC = "dynamic"  # by the range of each tensor as it is computed


class GraphKind(enum.Enum):
    """What most of the work of a graph is."""

    CONVOLUTIONAL = "convolutional"
    TRANSFORMER = "transformer"
    RECURRENT = "recurrent"
    DENSE = "dense"  # matrix products, but no attention
    OTHER = "other"

    @property
    def int8(self) -> Int8Method:
        """The method that suits it: the activations of transformers differ too much from one input to the next."""
        return Int8Method.DYNAMIC if self is GraphKind.TRANSFORMER else Int8Method.STATIC


@dataclass(frozen=True, slots=True)
class Layer:
    """An operator with constant weights, which INT8 can quantize."""

    name: str
    operator: str
    weights: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a mode is made."""

    int8: Int8Method
    block_size: int = 32  # weights of INT4 that share a scale
    keep_float: frozenset[str] = frozenset()  # names of layers that INT8 and INT4 leave as they are

    def told(self, method: str) -> str:
        """`method` and what was left out."""
        return f"{method}, {len(self.keep_float)} layers in float" if self.keep_float else method


class GraphMaker(Protocol):
    """A source graph in the form that the quantizers take."""

    @property
    def engine(self) -> str:
        """That computes the reference."""
        ...

    @property
    def suffix(self) -> str:
        """Of the files it writes."""
        ...

    @property
    def operators(self) -> Counter[str]: ...

    @property
    def layers(self) -> Sequence[Layer]:
        """In the order of execution."""
        ...

    def copy(self, path: Path) -> None:
        """Writes the graph as it was given."""
        ...

    def make(self, mode: PrecisionMode, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        """Writes a mode other than FP32, and returns in words how it was made. `samples` are the same in all calls.

        Raises EngineError when the quantizers cannot make it of this graph.
        """
        ...


def open_maker(source: Path, scratch: Path) -> GraphMaker:
    """The maker for the graph in an ONNX file or an OpenVINO IR (`.xml`). It may write into the directory `scratch`.

    Raises SourceError for what cannot be read or quantized, EngineError where an engine refuses it.
    """
    if not source.is_file():
        raise SourceError(f"{source}: no such file")
    if source.suffix == ".xml":
        from dskquant.engines.openvino.quantize import IRMaker

        return IRMaker(source)
    from dskquant.engines.onnxruntime.quantize import ONNXMaker

    return ONNXMaker(source, scratch)


def kind_of(operators: Counter[str], layers: Sequence[Layer]) -> GraphKind:
    """Convolutional where convolutions outnumber matrix products, by the layers with weights."""
    convolutions = sum("Conv" in layer.operator for layer in layers)
    if convolutions > len(layers) - convolutions:
        return GraphKind.CONVOLUTIONAL
    if any("Attention" in operator for operator in operators) or (operators["Softmax"] and operators["MatMul"] > 2):
        return GraphKind.TRANSFORMER
    if any(operators[name] for name in ("LSTM", "GRU", "RNN", "LSTMSequence", "GRUSequence")):
        return GraphKind.RECURRENT
    return GraphKind.DENSE if layers else GraphKind.OTHER
