"""Makes the modes of an ONNX graph with the quantizers that come with ONNX Runtime."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.transformers.float16 import convert_float_to_float16

from dskquant.engines.onnxruntime.prepare import has_external_data, prepare, quiet_logging, read_onnx
from dskquant.errors import EngineError
from dskquant.modes import PrecisionMode
from dskquant.plain.maker import Int8Method, Layer, Recipe
from dskquant.plain.protocol import Tensors

STATIC_OPERATORS = ("Conv", "MatMul", "Gemm")
"""Sums and products of two activations, which the quantizers would take too, add noise and save no time."""

DYNAMIC_OPERATORS = ("MatMul", "Gemm")
BITS = 4
INT8_ACTIVATIONS = 4
"""Accuracy level of MatMulNBits: without it, it is several times slower."""


class ONNXMaker:
    """An ONNX graph, in the form that the quantizers take."""

    engine = "onnxruntime"
    suffix = ".onnx"

    def __init__(self, source: Path, scratch: Path) -> None:
        model = read_onnx(source)
        self._source = source
        self._prepared_path = scratch / "prepared.onnx"
        self._ranges_path = scratch / "ranges.json"
        self._prepared = prepare(model, source, self._prepared_path)
        self.operators = Counter(node.op_type for node in self._prepared.graph.node)
        self.layers = _layers(self._prepared.graph)

    def copy(self, path: Path) -> None:
        if has_external_data(onnx.load(self._source, load_external_data=False)):
            onnx.save(read_onnx(self._source), path)
        else:
            shutil.copyfile(self._source, path)

    def make(self, mode: PrecisionMode, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        makers: dict[PrecisionMode, Callable[[Recipe, Sequence[Tensors], Path], str]] = {
            PrecisionMode.FP16: self._make_fp16,
            PrecisionMode.INT8: self._make_static if recipe.int8 is Int8Method.STATIC else self._make_dynamic,
            PrecisionMode.INT4: self._make_int4,
        }
        try:
            with quiet_logging():
                return makers[mode](recipe, samples, path)
        except EngineError:
            raise
        except Exception as error:  # the quantizers raise whatever they stumble over
            raise EngineError(f"{self._source}: cannot be quantized: {type(error).__name__}: {error}") from error

    def _make_fp16(self, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        """Inputs and outputs keep their dtypes."""
        onnx.save(convert_float_to_float16(onnx.load(self._prepared_path), keep_io_types=True), path)
        return "float16 weights and activations"

    def _make_static(self, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        """Unsigned activations: OpenVINO takes signed ones as well, and silently computes nonsense with them."""
        kept = self._kept(recipe, STATIC_OPERATORS)
        quantize_static(
            self._prepared_path,
            path,
            _Reader(samples),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=list(STATIC_OPERATORS),
            nodes_to_exclude=kept,
            calibration_cache_path=self._ranges_path,
        )
        return recipe.told("static QDQ")

    def _make_dynamic(self, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        kept = self._kept(recipe, DYNAMIC_OPERATORS)
        quantize_dynamic(
            self._prepared_path,
            path,
            op_types_to_quantize=list(DYNAMIC_OPERATORS),
            per_channel=True,
            weight_type=QuantType.QInt8,
            # The quantizer turns Gemm into MatMul, with such names.
            nodes_to_exclude=[*kept, *(f"{name}_MatMul" for name in kept)],
        )
        return recipe.told("dynamic")

    def _make_int4(self, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        quantizer = MatMulNBitsQuantizer(
            onnx.load(self._prepared_path),
            bits=BITS,
            block_size=recipe.block_size,
            accuracy_level=INT8_ACTIVATIONS,
            nodes_to_exclude=self._kept(recipe, ("MatMul",)),
        )
        quantizer.process()
        quantizer.model.save_model_to_file(path)
        return recipe.told(f"MatMulNBits, blocks of {recipe.block_size}")

    def _kept(self, recipe: Recipe, operators: Sequence[str]) -> list[str]:
        """The layers to leave out. Raises EngineError where no other is left."""
        quantized = {layer.name for layer in self.layers if layer.operator in operators}
        if not quantized - recipe.keep_float:
            why = "all of them are kept in float" if quantized else "there is none outside of branches and loops"
            raise EngineError(f"{self._source}: no {', '.join(operators)} with constant weights to quantize: {why}")
        return sorted(recipe.keep_float)


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # untyped
    def __init__(self, samples: Sequence[Tensors]) -> None:
        self._left = iter(samples)

    def get_next(self) -> Tensors | None:
        return next(self._left, None)


def _layers(graph: onnx.GraphProto) -> tuple[Layer, ...]:
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    return tuple(
        Layer(node.name, node.op_type, sizes[node.input[1]])
        for node in graph.node
        if node.op_type in STATIC_OPERATORS and node.input[1] in sizes
    )
