"""Puts the planes of a parameter set in the place of the weights of a paged model.

With shared weights each linear becomes FC(x, base) + FC(x[rows], residual) scattered back onto its rows: `rows`, an
input of the graph, names the tokens of the step that are served in INT8. So the precision is chosen per token, and one
graph serves both modes. With separate weights a graph has the base plane or the 8-bit plane alone. Engines fuse the
decompression (code - zero-point) * scale into the matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from dskquant.engines.openvino.ir import find_weights
from dskquant.engines.openvino.paged import add_row_input, gather_rows
from dskquant.errors import StoreError
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import MappedMatrix, MatrixReader, ParameterSet
from dskquant.planes import pack_u4
from dskquant.scheme import Role, TensorScheme

RESIDUAL_ROWS = "residual_rows"

KeepAlive = list[Any]
"""Arrays whose memory the constants of a model share: they must outlive it, or its weights turn to garbage."""

LinearRewrite = Callable[[ov.Output, str, TensorScheme], ov.Node]
"""Makes the product of tokens with the weight of that name and scheme."""


def use_planes(model: ov.Model, parameters: ParameterSet, modes: frozenset[PrecisionMode]) -> Source:
    """Rewrites a paged model in place to compute with `parameters` in `modes`; returns what must outlive the model.

    Raises StoreError when the set does not cover the weights of the model or has other shapes.
    """
    source = Source(parameters.matrices())
    replace_weights(model, parameters, source, _rewrite_for(model, source, modes))
    return source


def replace_weights(model: ov.Model, parameters: ParameterSet, source: Source, rewrite: LinearRewrite) -> None:
    """Puts `rewrite` in the place of every linear of a paged model, and 8-bit matrices in that of the others.

    Raises StoreError when the set does not cover the weights of the model or has other shapes.
    """
    for weight in find_weights(model):
        scheme = parameters.tensors.get(weight.name)
        if scheme is None or scheme.shape != weight.shape:
            found = "no such tensor" if scheme is None else f"shape {list(scheme.shape)}"
            raise StoreError(f"the parameter set does not fit {weight.name} {list(weight.shape)}: {found}")
        if weight.role is Role.LINEAR:
            for matmul in weight.matmuls:
                product = rewrite(matmul.input_value(0), weight.name, scheme)
                product.set_friendly_name(matmul.get_friendly_name())
                matmul.output(0).replace(product.output(0))
        else:
            weight.source.replace(source.eight_bit(weight.name, scheme).output(0))


class Source:
    """The mapped parameter set whose memory the constants of a model share: it must outlive the model."""

    def __init__(self, matrices: MatrixReader) -> None:
        self._matrices = matrices
        self._keep_alive: KeepAlive = []

    def plane(self, name: str, plane: str, scheme: TensorScheme) -> ov.Node:
        """A plane of a linear layer, dequantized in the graph."""
        kind = ov.Type.u8 if plane == "int8" else ov.Type.u4
        return dequantized(self._matrices.plane(name, plane, scheme), scheme.shape, kind, self._keep_alive)

    def eight_bit(self, name: str, scheme: TensorScheme) -> ov.Node:
        """An embedding or lm_head, dequantized in the graph."""
        return dequantized(self._matrices.eight_bit(name, scheme), scheme.shape, ov.Type.u8, self._keep_alive)

    def release_pages(self) -> None:
        """Lets go of the pages of its files; they are read again when they are touched."""
        self._matrices.release_pages()


def _rewrite_for(model: ov.Model, source: Source, modes: frozenset[PrecisionMode]) -> LinearRewrite:
    if modes == {PrecisionMode.INT4, PrecisionMode.INT8}:
        return SharedPlanes(source, add_row_input(model, RESIDUAL_ROWS)).product
    if modes == {PrecisionMode.INT8}:
        return lambda tokens, name, scheme: _linear(tokens, source.plane(name, "int8", scheme))
    return lambda tokens, name, scheme: _base_product(tokens, name, scheme, source)


def _base_product(tokens: ov.Output, name: str, scheme: TensorScheme, source: Source) -> ov.Node:
    product = _linear(tokens, source.plane(name, "base", scheme))
    if scheme.always_residual:
        product = ops.add(product, _linear(tokens, source.plane(name, "residual", scheme)))
    return product


class SharedPlanes:
    """Linears whose tokens choose between base and base + residual."""

    def __init__(self, source: Source, rows: ov.Node) -> None:
        self._source = source
        self._rows = rows
        self._scatter_rows = ops.unsqueeze(rows, ops.constant(np.int32(1)))
        self._selected: dict[tuple[str, int], ov.Node] = {}

    def product(self, tokens: ov.Output, name: str, scheme: TensorScheme) -> ov.Node:
        base = _base_product(tokens, name, scheme, self._source)
        if scheme.always_residual:
            return base
        correction = _linear(self._select(tokens).output(0), self._source.plane(name, "residual", scheme))
        return ops.scatter_nd_update(base, self._scatter_rows, correction, reduction="sum")

    def _select(self, tokens: ov.Output) -> ov.Node:
        """The INT8 rows of `tokens`, gathered once for all layers that read the same tensor (q, k and v; gate, up)."""
        key = (tokens.get_node().get_name(), tokens.get_index())
        if key not in self._selected:
            self._selected[key] = gather_rows(tokens, self._rows)
        return self._selected[key]


def dequantized(matrix: MappedMatrix, shape: tuple[int, int], kind: ov.Type, keep_alive: KeepAlive) -> ov.Node:
    """The matrix of `shape` in float32, computed in the graph from codes of type `kind` (u4 or u8).

    Engines fuse this pattern into the matrix product that reads it. What must outlive it is added to `keep_alive`.
    """
    rows, columns = shape
    groups = matrix.scales.shape[1]
    grouped = [rows, groups, columns // groups] if groups > 1 else [rows, columns]
    per_group = [rows, groups, 1] if groups > 1 else [rows, 1]
    zero_points = pack_u4(matrix.zero_points.reshape(1, -1)) if kind == ov.Type.u4 else matrix.zero_points
    keep_alive += [matrix, zero_points]
    codes = ops.convert(_constant(matrix.codes, grouped, kind), ov.Type.f16)
    centre = ops.convert(_constant(zero_points, per_group, kind), ov.Type.f16)
    values = ops.multiply(ops.subtract(codes, centre), _constant(matrix.scales, per_group, ov.Type.f16))
    if groups > 1:
        values = ops.reshape(values, ops.constant(np.array([rows, columns], np.int64)), special_zero=False)
    return ops.convert(values, ov.Type.f32)


def _constant(array: Any, shape: list[int], kind: ov.Type) -> ov.Node:
    return ov.op.Constant(ov.Tensor(array, ov.Shape(shape), kind))


def _linear(tokens: ov.Output, weights: ov.Node) -> ov.Node:
    return ops.matmul(tokens, weights, transpose_a=False, transpose_b=True)
