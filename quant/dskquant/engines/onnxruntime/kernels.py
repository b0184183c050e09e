"""Matrix products of the ONNX graph: with the source weights in float32, or with the planes of a parameter set."""

from __future__ import annotations

from onnx import TensorProto

from dskquant.architecture import DecoderConfig
from dskquant.decoder import EMBEDDING, LM_HEAD
from dskquant.engines.onnxruntime.emit import RESIDUAL_ROWS
from dskquant.engines.onnxruntime.graph_writer import CONTRIB, GraphWriter
from dskquant.engines.onnxruntime.nbits import NBitsMatrix, repack
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

    def linear(self, tokens: str, module: str, outputs: int, inputs: int, bias: str) -> str:
        product = self._product(tokens, self._matrix(f"{module}.weight", outputs, inputs))
        return self._writer.node("Add", [product, bias]) if bias else product

    def logits(self, hidden: str) -> str:
        return self._product(hidden, self._matrix(EMBEDDING if self._config.tied else LM_HEAD, *self._vocabulary))

    @property
    def _vocabulary(self) -> tuple[int, int]:
        return self._config.vocab_size, self._config.hidden_size

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

    def linear(self, tokens: str, module: str, outputs: int, inputs: int, bias: str) -> str:
        name, writer = f"{module}.weight", self._writer
        scheme = self._scheme(name, outputs, inputs)
        product = self._plane_product(tokens, name, self._plane, scheme, bias)
        if self._plane != "base" or not (scheme.always_residual or self._rows):
            return product
        if scheme.always_residual:
            return writer.node("Add", [product, self._plane_product(tokens, name, "residual", scheme)])
        correction = self._plane_product(self._select(tokens), name, "residual", scheme)
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

    def _plane_product(self, tokens: str, name: str, plane: str, scheme: TensorScheme, bias: str = "") -> str:
        matrix = repack(name, self._matrices.plane(name, plane, scheme), 8 if plane == "int8" else 4)
        return self._multiply(tokens, f"{name}.{plane}", matrix, bias)

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
