"""Inputs to calibrate and to measure with: those of a file, or random ones. A sample is what one run takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import SourceError, TensorError
from dskquant.plain.npz import load_npz
from dskquant.plain.protocol import Tensors, TensorSpec
from dskquant.plain.store import RANDOM

MOST_DATA_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Where samples come from."""

    path: Path | None  # an .npz file; None: random
    rows: int = 64  # samples, at most
    open_size: int = 64  # of the open dimensions of random samples, but the first
    seed: int = 0  # of random samples

    @property
    def source(self) -> str:
        """As the manifest of a store tells it."""
        return self.path.name if self.path else RANDOM

    def samples(self, specs: Sequence[TensorSpec]) -> list[Tensors]:
        """For a graph with inputs of `specs`. Raises what `read_samples` raises."""
        if self.path is None:
            return random_samples(specs, self.rows, self.open_size, self.seed)
        return read_samples(self.path, specs, self.rows)


def read_samples(path: Path, specs: Sequence[TensorSpec], most: int) -> list[Tensors]:
    """At most `most` samples of an `.npz` file of arrays named as the inputs, with a row for each sample.

    Where an input has an open first dimension, or one of 1, a row is what it takes without that dimension; any input
    may have its rows along a dimension more. Raises SourceError, naming file and input.
    """
    if path.suffix != ".npz":
        raise SourceError(f"{path}: not an .npz file")
    arrays = load_npz(path, MOST_DATA_BYTES, SourceError)
    try:
        _check_names(specs, arrays)
        rows = _common_rows({spec.name: arrays[spec.name] for spec in specs})
        return [{spec.name: _row(spec, arrays[spec.name], row) for spec in specs} for row in range(min(rows, most))]
    except TensorError as error:
        raise SourceError(f"{path}: {error}") from error


def random_samples(specs: Sequence[TensorSpec], rows: int, size: int, seed: int) -> list[Tensors]:
    """Normal floats, and integers that are 0 or 1; open dimensions are `size` but for the first, which is 1."""
    random = np.random.default_rng(seed)
    return [{spec.name: _random(spec, size, random) for spec in specs} for _ in range(rows)]


def rows_of(samples: Sequence[Tensors]) -> dict[str, NDArray[Any]]:
    """The samples of a graph with a batch axis as one batch."""
    return {name: np.concatenate([sample[name] for sample in samples]) for name in samples[0]}


def _random(spec: TensorSpec, size: int, random: np.random.Generator) -> NDArray[Any]:
    open_sizes = (1, *(size for _ in spec.shape[1:]))
    shape = [wanted or fallback for wanted, fallback in zip(spec.shape, open_sizes[: len(spec.shape)], strict=True)]
    values = random.standard_normal(shape) if spec.dtype.kind == "f" else random.integers(0, 2, shape)
    return np.asarray(values, spec.dtype)


def _check_names(specs: Sequence[TensorSpec], arrays: Tensors) -> None:
    known = [spec.name for spec in specs]
    for name in arrays:
        if name not in known:
            raise TensorError(name, f"no such input; known: {', '.join(known)}")
    for name in known:
        if name not in arrays:
            raise TensorError(name, "is missing")


def _common_rows(arrays: Tensors) -> int:
    rows = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise TensorError(next(iter(rows)), f"the inputs have different numbers of rows: {told}")
    if (count := next(iter(rows.values()))) == 0:
        raise TensorError(next(iter(rows)), "has no rows")
    return count


def _row(spec: TensorSpec, array: NDArray[Any], row: int) -> NDArray[Any]:
    rank = len(spec.shape)
    keeps_first = array.ndim == rank and rank > 0 and spec.shape[0] in (None, 1)
    if not keeps_first and array.ndim != rank + 1:
        raise TensorError(spec.name, f"shape {list(array.shape)} is not allowed; allowed: {_allowed(spec)}")
    sample = np.ascontiguousarray(array[row : row + 1] if keeps_first else array[row]).reshape(
        (1, *array.shape[1:]) if keeps_first else array.shape[1:]
    )
    spec.check(sample)
    return sample


def _allowed(spec: TensorSpec) -> str:
    sizes = ["any" if size is None else str(size) for size in spec.shape]
    stacked = f"[{', '.join(['rows', *sizes])}]"
    return f"[{', '.join(['rows', *sizes[1:]])}] or {stacked}" if sizes and sizes[0] in ("any", "1") else stacked
