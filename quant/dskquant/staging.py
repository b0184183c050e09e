"""Brings the weights of a source into the form they are stored in, one piece of a tensor at a time.

What lies in the source file as it shall be stored is only checked and stays mapped; all else is written to a scratch
file and mapped from there. So no more than one piece is ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import SourceError
from dskquant.floats import NUMPY_FLOATS, all_finite, from_float32, to_float32
from dskquant.parameter_set import Progress
from dskquant.sources.protocol import SourceTensor, TensorSource

ALIGNMENT = 64  # bytes, of each tensor in the scratch file


@dataclass(frozen=True, slots=True)
class StagedWeight:
    """A weight as it is stored, mapped from a file; bf16 as uint16 bit patterns."""

    values: NDArray[Any]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Scratched:
    offset: int
    shape: tuple[int, ...]
    dtype: str


def stage_weights(
    source: TensorSource, names: Iterable[str], dtype: str | None, scratch: Path, progress: Progress
) -> dict[str, StagedWeight]:
    """The weights called `names`, as `dtype` or else as the source keeps them.

    `scratch` must outlive what is returned. Raises SourceError, naming file and tensor, for NaN and infinite values.
    """
    names = list(names)
    staged: dict[str, StagedWeight | _Scratched] = {}
    with scratch.open("wb") as file:
        for done, name in enumerate(names):
            progress("weights", done, len(names))
            staged[name] = _stage(source.tensor(name), dtype, file)
    progress("weights", len(names), len(names))
    mapped = np.memmap(scratch, np.uint8, "r") if scratch.stat().st_size else np.empty(0, np.uint8)
    return {name: _map(item, mapped) if isinstance(item, _Scratched) else item for name, item in staged.items()}


def _stage(tensor: SourceTensor, dtype: str | None, file: BinaryIO) -> StagedWeight | _Scratched:
    target = dtype or tensor.kept_dtype
    if tensor.mapped is not None and tensor.dtype == target:
        for piece in tensor.pieces():
            _refuse_non_finite(tensor, piece, target)
        return StagedWeight(tensor.mapped, target)
    file.write(bytes(-file.tell() % ALIGNMENT))
    offset = file.tell()
    for piece in _converted(tensor, target):
        file.write(np.ascontiguousarray(piece).data)
    return _Scratched(offset, tensor.shape, target)


def _converted(tensor: SourceTensor, target: str) -> Iterator[NDArray[Any]]:
    for piece in tensor.pieces():
        _refuse_non_finite(tensor, piece, tensor.dtype)
        if tensor.dtype == target:
            yield piece
            continue
        rounded = from_float32(to_float32(piece, tensor.dtype), target)
        if not all_finite(rounded, target):
            raise SourceError(f"{tensor.origin}: values too large for {target}; convert with --dtype bf16 or f32")
        yield rounded


def _refuse_non_finite(tensor: SourceTensor, piece: NDArray[Any], dtype: str) -> None:
    if not all_finite(piece, dtype):
        raise SourceError(f"{tensor.origin}: holds NaN or infinite values")


def _map(item: _Scratched, mapped: NDArray[np.uint8]) -> StagedWeight:
    kind = NUMPY_FLOATS[item.dtype]
    end = item.offset + kind.itemsize * int(np.prod(item.shape))
    return StagedWeight(np.asarray(mapped[item.offset : end]).view(kind).reshape(item.shape), item.dtype)
