"""Makes the modes of an OpenVINO IR with NNCF, which is an extra: FP16 needs none."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from dskquant.engines.openvino.core import CORE
from dskquant.errors import EngineError, SourceError
from dskquant.modes import PrecisionMode
from dskquant.plain.maker import GraphKind, Int8Method, Layer, Recipe, kind_of
from dskquant.plain.protocol import Tensors

WEIGHT_INPUT = 1
LAYERS = {"Convolution", "GroupConvolution", "MatMul"}


class IRMaker:
    """A graph of an OpenVINO IR."""

    engine = "openvino"
    suffix = ".xml"

    def __init__(self, source: Path) -> None:
        self._source = source
        model = self._read()
        self.operators = Counter(node.get_type_name() for node in model.get_ops())
        self.layers = tuple(_layers(model))

    def copy(self, path: Path) -> None:
        shutil.copyfile(self._source, path)
        shutil.copyfile(self._source.with_suffix(".bin"), path.with_suffix(".bin"))

    def make(self, mode: PrecisionMode, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        makers: dict[PrecisionMode, Callable[[Recipe, Sequence[Tensors], Path], str]] = {
            PrecisionMode.FP16: self._make_fp16,
            PrecisionMode.INT8: self._make_int8,
            PrecisionMode.INT4: self._make_int4,
        }
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # NNCF shows its progress there
                return makers[mode](recipe, samples, path)
        except EngineError:
            raise
        except Exception as error:  # the quantizers raise whatever they stumble over
            raise EngineError(f"{self._source}: cannot be quantized: {type(error).__name__}: {error}") from error

    def _make_fp16(self, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        ov.save_model(self._read(), path, compress_to_fp16=True)
        return "float16 weights"

    def _make_int8(self, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        if recipe.int8 is Int8Method.DYNAMIC:
            return self._compress(recipe, "INT8_ASYM", path)
        nncf = _nncf()
        is_transformer = kind_of(self.operators, self.layers) is GraphKind.TRANSFORMER
        quantized = nncf.quantize(
            self._read(),
            nncf.Dataset([dict(sample) for sample in samples]),
            subset_size=len(samples),
            model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
            ignored_scope=nncf.IgnoredScope(names=sorted(recipe.keep_float)),
        )
        ov.save_model(quantized, path, compress_to_fp16=False)
        return recipe.told("static, by NNCF")

    def _make_int4(self, recipe: Recipe, samples: Sequence[Tensors], path: Path) -> str:
        return self._compress(recipe, "INT4_ASYM", path, group_size=recipe.block_size, all_layers=True)

    def _compress(self, recipe: Recipe, kind: str, path: Path, **options: object) -> str:
        nncf = _nncf()
        if not {layer.name for layer in self.layers if layer.operator == "MatMul"} - recipe.keep_float:
            raise EngineError(f"{self._source}: no MatMul with constant weights to quantize")
        compressed = nncf.compress_weights(
            self._read(),
            mode=nncf.CompressWeightsMode[kind],
            ignored_scope=nncf.IgnoredScope(names=sorted(recipe.keep_float)),
            **options,
        )
        ov.save_model(compressed, path, compress_to_fp16=False)
        return recipe.told(f"{kind} weights, by NNCF")

    def _read(self) -> ov.Model:
        try:
            return CORE.read_model(self._source)
        except Exception as error:  # the library raises plain RuntimeErrors, and others for files it cannot find
            raise SourceError(f"{self._source}: no OpenVINO IR that can be read: {error}") from error


def _nncf() -> Any:
    try:
        import nncf
    except ImportError:
        raise EngineError("an IR is quantized by NNCF, which is not installed: pip install 'dskd[nncf]'") from None
    nncf.set_log_level(logging.ERROR)  # it logs to stdout, which is for results
    return nncf


def _layers(model: ov.Model) -> list[Layer]:
    return [
        Layer(node.get_friendly_name(), node.get_type_name(), math.prod(node.input(WEIGHT_INPUT).get_shape()))
        for node in model.get_ordered_ops()
        if node.get_type_name() in LAYERS and _is_constant(node.input_value(WEIGHT_INPUT).get_node())
    ]


def _is_constant(node: ov.Node) -> bool:
    """A constant, or one that is converted, as IRs with float16 weights have them."""
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")
