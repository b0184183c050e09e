"""Second moments of what linear layers read: the matrix E[x x^T], or its diagonal E[x^2] alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from dskquant.calibration.windows import Window
from dskquant.engines.protocol import CalibrationGraph, LinearUnit
from dskquant.forward import forward
from dskquant.modes import REFERENCE
from dskquant.parameter_set import Progress
from dskquant.planes import Float32

BYTES_AT_ONCE = 1 << 30
"""Of the moments of one pass over the text; larger models take several passes."""

PIECE = 256
"""Tokens run at once: bounds the memory of what all layers read."""

START_WEIGHT = 64
"""How many tokens the first one of a window counts for. All others attend to it (Xiao et al. 2023, "Efficient
Streaming Language Models with Attention Sinks"), so its error spoils them all; and as it looks much the same in every
window, giving it its weight takes next to nothing from the others.
"""

Moments = dict[LinearUnit, Float32]


def passes(columns: Mapping[LinearUnit, int], limit: int = BYTES_AT_ONCE) -> Iterator[list[LinearUnit]]:
    """Cuts the units, which read `columns` inputs, into runs whose full moments fit into `limit` bytes; at least one
    unit a run.
    """
    run: list[LinearUnit] = []
    taken = 0
    for unit, size in columns.items():
        needed = size * size * np.dtype(np.float32).itemsize
        if run and taken + needed > limit:
            yield run
            run, taken = [], 0
        run.append(unit)
        taken += needed
    if run:
        yield run


def second_moments(
    graph: CalibrationGraph,
    windows: Sequence[Window],
    units: Collection[LinearUnit],
    block_size: int,
    progress: Progress,
    *,
    diagonal: bool = False,
) -> Moments:
    """E[x x^T] [K, K] of each of `units`, or E[x^2] [K] if only the `diagonal` is wanted, over all tokens of `windows`,
    the first token of each counted START_WEIGHT times.

    The cache bound to `graph` must hold a window.
    """
    product = _squares if diagonal else _products
    moments: Moments = {}
    tokens = sum(len(window) + START_WEIGHT - 1 for window in windows)
    for done, window in enumerate(windows):
        progress("reading activations", done, len(windows))
        for piece, _ in enumerate(forward(graph, window, REFERENCE, block_size=block_size, piece=PIECE)):
            for unit, inputs in graph.unit_inputs():
                if unit in units:
                    weighted = inputs if piece else _with_heavy_start(inputs)
                    _add(moments, unit, product(weighted) / np.float32(tokens))
    progress("reading activations", len(windows), len(windows))
    return moments


def _with_heavy_start(inputs: Float32) -> Float32:
    weighted = inputs.copy()
    weighted[0] *= np.float32(START_WEIGHT**0.5)
    return weighted


def _products(inputs: Float32) -> Float32:
    products: Float32 = inputs.T @ inputs
    return products


def _squares(inputs: Float32) -> Float32:
    squares: Float32 = np.einsum("tk,tk->k", inputs, inputs)
    return squares


def _add(moments: Moments, unit: LinearUnit, share: Float32) -> None:
    if unit in moments:
        moments[unit] += share
    else:
        moments[unit] = share
