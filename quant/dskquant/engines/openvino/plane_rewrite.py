"""Puts the planes of a parameter set in the place of the weights of a paged model.

Each linear becomes FC(x, base) + FC(x[rows], residual) scattered back onto its rows: `rows`, an input of the graph,
names the tokens of the step that are served in INT8. So the precision is chosen per token, and one graph serves both.
Engines fuse the decompression (code - zero-point) * scale into the matrix product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from dskquant.engines.openvino.ir import Weight, find_weights
from dskquant.engines.openvino.paged import add_row_input, gather_rows
from dskquant.errors import StoreError
from dskquant.parameter_set import MappedMatrix, MatrixReader, ParameterSet
from dskquant.planes import pack_u4
from dskquant.scheme import Role, TensorScheme

RESIDUAL_ROWS = "residual_rows"

KeepAlive = list[Any]
"""Arrays whose memory the constants of a model share: they must outlive it, or its weights turn to garbage."""


def use_planes(model: ov.Model, parameters: ParameterSet) -> KeepAlive:
    """Rewrites a paged model in place to compute with `parameters`; returns what must outlive the model.

    Raises StoreError when the set does not cover the weights of the model or has other shapes.
    """
    rewrite = _PlaneRewrite(model, parameters)
    for weight in find_weights(model):
        rewrite.replace(weight)
    return rewrite.keep_alive


class _PlaneRewrite:
    def __init__(self, model: ov.Model, parameters: ParameterSet) -> None:
        self.keep_alive: KeepAlive = []
        self._schemes = parameters.tensors
        self._matrices: MatrixReader = parameters.matrices()
        self._rows = add_row_input(model, RESIDUAL_ROWS)
        self._scatter_rows = ops.unsqueeze(self._rows, ops.constant(np.int32(1)))
        self._selected: dict[tuple[str, int], ov.Node] = {}

    def replace(self, weight: Weight) -> None:
        scheme = self._schemes.get(weight.name)
        if scheme is None or scheme.shape != weight.shape:
            found = "no such tensor" if scheme is None else f"shape {list(scheme.shape)}"
            raise StoreError(f"the parameter set does not fit {weight.name} {list(weight.shape)}: {found}")
        if weight.role is Role.LINEAR:
            self._replace_linear(weight, scheme)
        else:
            matrix = self._matrices.eight_bit(weight.name)
            eight_bit = dequantized(matrix, scheme.shape, ov.Type.u8, self.keep_alive)
            weight.source.replace(eight_bit.output(0))

    def _replace_linear(self, weight: Weight, scheme: TensorScheme) -> None:
        base, residual = (
            dequantized(self._matrices.plane(weight.name, plane), scheme.shape, ov.Type.u4, self.keep_alive)
            for plane in ("base", "residual")
        )
        for matmul in weight.matmuls:
            tokens = matmul.input_value(0)
            coarse = _linear(tokens, base)
            if scheme.always_residual:
                exact = ops.add(coarse, _linear(tokens, residual))
            else:
                correction = _linear(self._select(tokens).output(0), residual)
                exact = ops.scatter_nd_update(coarse, self._scatter_rows, correction, reduction="sum")
            exact.set_friendly_name(matmul.get_friendly_name())
            matmul.output(0).replace(exact.output(0))

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
