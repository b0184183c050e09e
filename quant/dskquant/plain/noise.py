"""How far the answers of one graph are from those of another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import TensorError
from dskquant.plain.protocol import Tensors

MOST_DB = 200.0
"""Of answers that are equal, or nearly: beyond what float64 tells apart. The least is as far below zero."""

Pair = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class GraphNoise:
    """The noise of a graph, of its worst output in each respect."""

    sqnr_db: float  # signal to quantization noise, decibels in [-MOST_DB, MOST_DB]
    cosine: float  # mean over rows, in [-1, 1]
    top1: float | None  # share of rows with the same largest column, in [0, 1]; None: no output has classes

    @classmethod
    def between(cls, reference: Tensors, answers: Tensors) -> GraphNoise:
        """The noise of `answers` against `reference`, which have the same outputs, computed in float64.

        With r and a an output of the reference and of the answers, and r_i and a_i their rows (along the first
        dimension, all else flattened):

            SQNR    10 log10(sum r^2 / sum (r - a)^2), held within +-MOST_DB
            cosine  mean_i of r_i . a_i / (|r_i| |a_i|); 1 where both are zero, 0 where one is
            top-1   share of i with argmax r_i = argmax a_i, for float outputs of rank 2 with more than one column

        Outputs of integers count only where there are none of floats. Raises TensorError, naming the output, for one
        that is missing, of another shape, or not finite; ValueError where there is nothing to compare.
        """
        pairs = {name: (_numbers(name, reference), _answer(name, reference, answers)) for name in _compared(reference)}
        if not pairs:
            raise ValueError("no outputs to compare")
        classes = [_top1(pair) for name, pair in pairs.items() if _has_classes(reference[name])]
        return cls(
            min(_sqnr_db(pair) for pair in pairs.values()),
            min(_cosine(pair) for pair in pairs.values()),
            min(classes, default=None),
        )


def _compared(reference: Tensors) -> list[str]:
    floats = [name for name, tensor in reference.items() if tensor.dtype.kind == "f"]
    return [name for name in floats or reference if reference[name].size]


def _has_classes(tensor: NDArray[Any]) -> bool:
    return tensor.dtype.kind == "f" and tensor.ndim == 2 and tensor.shape[1] > 1


def _answer(name: str, reference: Tensors, answers: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    if name not in answers:
        raise TensorError(name, "is missing")
    wanted, found = reference[name].shape, answers[name].shape
    if wanted != found:
        raise TensorError(name, f"shape {list(found)}, where the reference has {list(wanted)}")
    return _numbers(name, answers)


def _numbers(name: str, tensors: Tensors) -> NDArray[np.float64]:
    """As rows of float64, [rows, values of a row]."""
    tensor = np.asarray(tensors[name], np.float64)
    if not np.isfinite(tensor).all():
        raise TensorError(name, "has values that are not finite")
    return tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1)


def _sqnr_db(pair: Pair) -> float:
    reference, answers = pair
    signal, noise = float(np.square(reference).sum()), float(np.square(reference - answers).sum())
    if noise == 0:
        return MOST_DB
    return max(-MOST_DB, min(MOST_DB, 10 * math.log10(signal / noise))) if signal else -MOST_DB


def _cosine(pair: Pair) -> float:
    return float(np.mean(list(_row_cosines(pair))))


def _row_cosines(pair: Pair) -> Iterator[float]:
    for reference, answer in zip(*pair, strict=True):
        lengths = float(np.linalg.norm(reference) * np.linalg.norm(answer))
        if lengths:
            yield max(-1.0, min(1.0, float(reference @ answer) / lengths))
        else:
            yield float(not reference.any() and not answer.any())


def _top1(pair: Pair) -> float:
    reference, answers = pair
    return float(np.mean(reference.argmax(axis=1) == answers.argmax(axis=1)))
