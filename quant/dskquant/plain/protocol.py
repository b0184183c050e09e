"""What the rest of the project knows of a plain graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import TensorError

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or an output of a graph."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]  # None: any size

    def check(self, tensor: NDArray[Any]) -> None:
        """Raises TensorError unless `tensor` has this dtype and fits this shape; nothing is ever converted."""
        if tensor.dtype != self.dtype:
            raise TensorError(self.name, f"{tensor.dtype} is not allowed; allowed: {self.dtype}")
        fits = len(tensor.shape) == len(self.shape) and all(
            wanted in (None, size) for wanted, size in zip(self.shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in self.shape)
            raise TensorError(self.name, f"shape {list(tensor.shape)} is not allowed; allowed: [{wanted}]")


class PlainGraph(Protocol):
    """A graph in memory. One run at a time; any thread may ask for it."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def run(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """All outputs by name, in arrays that belong to the caller.

        Raises TensorError unless `tensors` are the inputs, EngineError when the engine fails on them.
        """
        ...


def check_tensors(specs: Sequence[TensorSpec], tensors: Tensors) -> None:
    """Raises TensorError unless `tensors` are exactly those of `specs`."""
    known = {spec.name: spec for spec in specs}
    for name in tensors:
        if name not in known:
            raise TensorError(name, f"no such input; known: {', '.join(known)}")
    for name, spec in known.items():
        if name not in tensors:
            raise TensorError(name, "is missing")
        spec.check(tensors[name])
