"""Matrix products of the ONNX graph: with the source weights in float32, or with the planes of a parameter set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from dskquant.architecture import DecoderConfig
from dskquant.decoder import EMBEDDING, LM_HEAD
from dskquant.engines.onnxruntime.emit import RESIDUAL_ROWS, Linear
from dskquant.engines.onnxruntime.graph_writer import CONTRIB, GraphWriter
from dskquant.engines.onnxruntime.nbits import NBitsMatrix, joined, repack
from dskquant.engines.onnxruntime.stored_weights import StoredWeights
from dskquant.errors import StoreError
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.scheme import TensorScheme

INT8_ACTIVATIONS = 4
FLOAT_ACTIVATIONS = 1
"""Values of MatMulNBits' attribute accuracy_level."""


class FloatKernels:
    """Float32 arithmetic with the weights of the store; 16-bit ones are widened once, when the session is made."""

    def __init__(self, config: DecoderConfig, weights: StoredWeights, writer: GraphWriter) -> None:
        self._config = config
        self._weights = weights
        self._writer = writer

    def embed(self, ids: str) -> str:
        return self._writer.node("Gather", [self._matrix(EMBEDDING, *self._vocabulary), ids])

    def linears(self, tokens: str, layers: Sequence[Linear]) -> Sequence[str]:
        return [self._linear(tokens, layer) for layer in layers]

    def logits(self, hidden: str) -> str:
        return self._product(hidden, self._matrix(EMBEDDING if self._config.tied else LM_HEAD, *self._vocabulary))

    @property
    def _vocabulary(self) -> tuple[int, int]:
        return self._config.vocab_size, self._config.hidden_size

    def _linear(self, tokens: str, layer: Linear) -> str:
        product = self._product(tokens, self._matrix(f"{layer.module}.weight", layer.outputs, layer.inputs))
        if layer.bias is None:
            return product
        return self._writer.node("Add", [product, self._writer.constant(f"{layer.module}.bias", layer.bias)])

    def _product(self, tokens: str, matrix: str) -> str:
        return self._writer.node("FusedMatMul", [tokens, matrix], domain=CONTRIB, transB=1)

    def _matrix(self, name: str, outputs: int, inputs: int) -> str:
        return self._writer.constant(name, self._weights.float32(name, (outputs, inputs)))


class PlaneKernels:
    """Products with quantized planes; in a graph of INT4 and INT8 the input `residual_rows` names the INT8 tokens."""

    def __init__(
        self,
        config: DecoderConfig,
        parameters: ParameterSet,
        modes: frozenset[PrecisionMode],
        accuracy_level: int,
        writer: GraphWriter,
    ) -> None:
        self._config = config
        self._parameters = parameters
        self._matrices = parameters.matrices()
        self._accuracy_level = accuracy_level
        self._writer = writer
        self._plane = "int8" if modes == {PrecisionMode.INT8} else "base"
        self._rows = ""
        if len(modes) > 1:
            self._rows = writer.input(RESIDUAL_ROWS, TensorProto.INT64, ["R", 2])
        self._selected: dict[str, str] = {}

    def embed(self, ids: str) -> str:
        """Rows are looked up as codes and dequantized: (code - zero-point) * scale."""
        scheme = self._scheme(EMBEDDING, self._config.vocab_size, self._config.hidden_size)
        matrix, writer = self._matrices.eight_bit(EMBEDDING, scheme), self._writer
        if matrix.scales.shape[1] != 1:
            raise StoreError(f"{EMBEDDING} has {matrix.scales.shape[1]} groups a row; 8-bit matrices have one")
        codes, scales, zero_points = (
            writer.node("Cast", [writer.node("Gather", [writer.constant(f"{EMBEDDING}.{part}", array), ids])], to=1)
            for part, array in (
                ("rows", matrix.codes),
                ("row_scales", matrix.scales),
                ("row_zero_points", matrix.zero_points),
            )
        )
        return writer.node("Mul", [writer.node("Sub", [codes, zero_points]), scales])

    def linears(self, tokens: str, layers: Sequence[Linear]) -> Sequence[str]:
        """Layers that read the same tensor are one product, where they are cut alike: threads meet less often."""
        schemes = [self._scheme(f"{layer.module}.weight", layer.outputs, layer.inputs) for layer in layers]
        if len(layers) > 1 and all(scheme.has_groups_of(schemes[0]) for scheme in schemes):
            product = self._linear(tokens, layers, schemes)
            return self._writer.split(product, [layer.outputs for layer in layers])
        return [self._linear(tokens, [layer], [scheme]) for layer, scheme in zip(layers, schemes, strict=True)]

    def _linear(self, tokens: str, layers: Sequence[Linear], schemes: Sequence[TensorScheme]) -> str:
        """One product, [B, S, outputs of all]."""
        writer, always_residual = self._writer, schemes[0].always_residual
        product = self._plane_product(tokens, layers, self._plane, schemes, _bias(writer, layers))
        if self._plane != "base" or not (always_residual or self._rows):
            return product
        if always_residual:
            return writer.node("Add", [product, self._plane_product(tokens, layers, "residual", schemes)])
        correction = self._plane_product(self._select(tokens), layers, "residual", schemes)
        return writer.node("ScatterND", [product, self._rows, correction], reduction="add")

    def logits(self, hidden: str) -> str:
        name = EMBEDDING if self._config.tied else LM_HEAD
        scheme = self._scheme(name, self._config.vocab_size, self._config.hidden_size)
        return self._multiply(hidden, name, repack(name, self._matrices.eight_bit(name, scheme), 8))

    def _select(self, tokens: str) -> str:
        """The INT8 rows of `tokens`, gathered once for all layers that read the same tensor (q, k and v; gate, up)."""
        if tokens not in self._selected:
            self._selected[tokens] = self._writer.node("GatherND", [tokens, self._rows])
        return self._selected[tokens]

    def _plane_product(
        self, tokens: str, layers: Sequence[Linear], plane: str, schemes: Sequence[TensorScheme], bias: str = ""
    ) -> str:
        bits = 8 if plane == "int8" else 4
        names = [f"{layer.module}.weight" for layer in layers]
        matrices = [
            repack(name, self._matrices.plane(name, plane, scheme), bits)
            for name, scheme in zip(names, schemes, strict=True)
        ]
        return self._multiply(tokens, f"{'+'.join(names)}.{plane}", joined(matrices), bias)

    def _multiply(self, tokens: str, name: str, matrix: NBitsMatrix, bias: str = "") -> str:
        writer = self._writer
        zero_points = ""
        if matrix.zero_points is not None:
            zero_points = writer.constant(f"{name}.zero_points", matrix.zero_points)
        inputs = [
            tokens,
            writer.constant(f"{name}.codes", matrix.codes),
            writer.constant(f"{name}.scales", matrix.scales),
            zero_points,
        ]
        return writer.node(
            "MatMulNBits",
            [*inputs, "", bias] if bias else inputs,
            domain=CONTRIB,
            K=matrix.columns,
            N=matrix.rows,
            bits=matrix.bits,
            block_size=matrix.block_size,
            accuracy_level=self._accuracy_level,
        )

    def _scheme(self, name: str, rows: int, columns: int) -> TensorScheme:
        scheme = self._parameters.tensors.get(name)
        if scheme is None or scheme.shape != (rows, columns):
            found = "no such tensor" if scheme is None else f"shape {list(scheme.shape)}"
            raise StoreError(f"the parameter set does not fit {name} {[rows, columns]}: {found}")
        return scheme


def _bias(writer: GraphWriter, layers: Sequence[Linear]) -> str:
    """The biases of `layers` end to end; "" where they have none."""
    biases = {f"{layer.module}.bias": layer.bias for layer in layers if layer.bias is not None}
    return writer.constant("+".join(biases), np.concatenate(list(biases.values()))) if biases else ""
