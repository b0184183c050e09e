"""Measures the divergence of many variants of one graph from the reference, whose answers are kept in a file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dskquant.calibration.windows import Window
from dskquant.engines.protocol import CalibrationGraph, Graph, LinearUnit, Logits
from dskquant.forward import forward
from dskquant.modes import REFERENCE

PIECE = 256

Float32 = NDArray[np.float32]


class Reference:
    """What the reference answers on some windows: probabilities [positions, V] in a file, and their negative entropy.

    In float32, which is exact to about 1e-6 nats a position: far below what the least noisy mode differs by.
    """

    def __init__(self, windows: Sequence[Window], graph: Graph, path: Path, block_size: int) -> None:
        """`graph` is the reference's; the cache bound to it holds a window."""
        self._windows = windows
        self._block_size = block_size
        self._negative_entropy: list[Float32] = []
        with path.open("wb") as file:
            for logits in self._answers(graph):
                log_probabilities = logits - _log_total(logits)
                probabilities = np.exp(log_probabilities)
                file.write(probabilities.data)
                self._negative_entropy.append(np.einsum("tv,tv->t", probabilities, log_probabilities))
                columns = logits.shape[1]
        self._probabilities = np.memmap(path, np.float32, "r").reshape(-1, columns)

    def mean_kl(self, graph: CalibrationGraph, with_residual: Collection[LinearUnit]) -> float:
        """Mean KL(reference || graph) in nats per token, `with_residual` in INT8 and all other units in INT4."""
        graph.use_residual(with_residual)
        total, first = 0.0, 0
        for logits, negative_entropy in zip(self._answers(graph), self._negative_entropy, strict=True):
            expected = self._probabilities[first : first + len(logits)]
            # sum P (ln P - ln Q), ln Q = logit - ln total
            cross = np.einsum("tv,tv->t", expected, logits) - _log_total(logits)[:, 0]
            total += float((negative_entropy - cross).sum(dtype=np.float64))
            first += len(logits)
        return max(total / first, 0.0)

    def _answers(self, graph: Graph) -> Iterator[Logits]:
        for window in self._windows:
            yield from forward(graph, window, REFERENCE, block_size=self._block_size, piece=PIECE)


def _log_total(logits: Logits) -> Float32:
    """ln sum exp of each row, [T, 1]."""
    highest = logits.max(axis=1, keepdims=True)
    total: Float32 = highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    return total
