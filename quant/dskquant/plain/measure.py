"""Runs samples through graphs and compares the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import TensorError
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import PlainGraph, Tensors, TensorSpec
from dskquant.plain.samples import rows_of

PROBED_ROWS = 4
LEAST_BATCH_SQNR_DB = 30.0
"""Of rows in a batch against the same rows alone, which differ by rounding."""


def answers_to(graph: PlainGraph, samples: Sequence[Tensors]) -> list[dict[str, NDArray[Any]]]:
    """What `graph` answers to each sample."""
    return [graph.run(sample) for sample in samples]


def noise_over(reference: Sequence[Tensors], answers: Sequence[Tensors]) -> GraphNoise:
    """The noise of the answers to several samples, taken together. Raises TensorError as `GraphNoise.between` does."""
    for wanted, found in zip(reference, answers, strict=True):
        _check_shapes(wanted, found)
    return GraphNoise.between(_joined(reference), _joined(answers))


def check_finite(answers: Sequence[Tensors]) -> None:
    """Raises TensorError, naming the output, where a value of a float output is not finite."""
    for answer in answers:
        for name, tensor in answer.items():
            if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                raise TensorError(name, "has values that are not finite")


def find_batch_axis(graph: PlainGraph, samples: Sequence[Tensors], answers: Sequence[Tensors]) -> int | None:
    """0 where all tensors have an open first dimension, and rows in a batch are computed as they are alone.

    That a dimension is open does not tell what it is, so the graph is asked.
    """
    if not all(map(_is_open, (*graph.inputs, *graph.outputs))):
        return None
    batch = [*samples[:PROBED_ROWS], samples[0]]  # at least two
    alone = [*answers[:PROBED_ROWS], answers[0]]
    try:
        together = graph.run(rows_of(batch))
        noise = GraphNoise.between(_joined(alone), together)
    except Exception:  # whatever the engine says of a batch, it is none
        return None
    rows_are_kept = all(tensor.shape[0] == len(batch) for tensor in together.values())
    return 0 if rows_are_kept and noise.sqnr_db >= LEAST_BATCH_SQNR_DB else None


def _is_open(spec: TensorSpec) -> bool:
    return bool(spec.shape) and spec.shape[0] is None


def _check_shapes(reference: Tensors, answers: Tensors) -> None:
    for name, tensor in reference.items():
        if name in answers and answers[name].shape != tensor.shape:
            raise TensorError(name, f"shape {list(answers[name].shape)}, where the reference has {list(tensor.shape)}")


def _joined(answers: Sequence[Tensors]) -> dict[str, NDArray[Any]]:
    return {name: _join([answer[name] for answer in answers]) for name in answers[0]}


def _join(tensors: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Along the first dimension; values alone where the others differ between samples."""
    rows = [np.atleast_1d(tensor) for tensor in tensors]
    if len({tensor.shape[1:] for tensor in rows}) == 1:
        return np.concatenate(rows)
    return np.concatenate([tensor.ravel() for tensor in rows])[np.newaxis]
