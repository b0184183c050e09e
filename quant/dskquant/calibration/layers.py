"""Quantizes the linear layers of a unit, given what their shared input is like."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import numpy as np

from dskquant.calibration.error_feedback import quantize_with_feedback
from dskquant.calibration.range_search import search_ranges
from dskquant.engines.protocol import WeightSource
from dskquant.planes import Float32, QuantizedMatrix, pack_u4, quantize, rounded
from dskquant.scheme import TensorScheme
from dskquant.set_writer import Tensors, parts_of


class Method(enum.Enum):
    """How the base plane is found."""

    GPTQ = "gptq"  # error feedback on top of the search
    SEARCH = "search"  # scales and zero-points by search, codes by rounding


def quantize_unit(
    weights: Sequence[WeightSource], schemes: Mapping[str, TensorScheme], moments: Float32, method: Method
) -> Tensors:
    """The tensors of the set for `weights`, which all read the input with the second moments `moments`: [K, K], or
    for Method.SEARCH their diagonal [K].
    """
    matrices = [np.concatenate(list(weight.pieces())) for weight in weights]
    scheme = schemes[weights[0].name]
    whole = np.concatenate(matrices)
    base = _plane(whole, moments, scheme, method)
    residual = _plane(whole - base.dequantized(), moments, scheme, method)
    tensors: Tensors = {}
    first_row = 0
    for weight, matrix in zip(weights, matrices, strict=True):
        rows = slice(first_row, first_row + len(matrix))
        tensors |= _plane_parts(f"{weight.name}.base.", base, rows) | _plane_parts(
            f"{weight.name}.residual.", residual, rows
        )
        if scheme.int8_plane:
            exact = quantize(matrix, 8, scheme.group_size, scheme.symmetric)
            tensors |= parts_of(f"{weight.name}.int8.", exact, exact.codes)
        first_row = rows.stop
    return tensors


def _plane(weights: Float32, moments: Float32, scheme: TensorScheme, method: Method) -> QuantizedMatrix:
    if method is Method.GPTQ:
        return quantize_with_feedback(weights, moments, scheme.group_size, scheme.symmetric)
    return rounded(weights, *search_ranges(weights, moments, 4, scheme.group_size, scheme.symmetric), 4)


def _plane_parts(prefix: str, plane: QuantizedMatrix, rows: slice) -> Tensors:
    part = QuantizedMatrix(plane.codes[rows], plane.scales[rows], plane.zero_points[rows])
    return parts_of(prefix, part, pack_u4(part.codes))
