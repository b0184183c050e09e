"""Reads a safetensors file through a memory map: nothing is copied, and nothing in the header is trusted.

Format: https://huggingface.co/docs/safetensors, `[8 bytes: header size][header: JSON][data]`.
"""

from __future__ import annotations

import json
import mmap
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import QuantError, SourceError
from dskquant.fields import is_text

MAX_HEADER_BYTES = 100_000_000
"""As much as the format allows; see `MappedSafetensors` for files that anybody may have made."""

LONGEST_NAME = 512
"""Characters of the name of a tensor; those of models have less than a hundred."""

SIZE_FIELD_BYTES = 8
MAX_DIMENSION = 1 << 40

# numpy has no 8-bit floats and no bfloat16: those are handed out as their bit patterns.
NUMPY_TYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in bytes, from the start of the data
    end: int


class MappedSafetensors:
    """One safetensors file, its whole header checked when it is opened.

    Raises `error` (SourceError unless told otherwise), naming file and tensor, for a header that is no JSON or has more
    than `most_header_bytes`, a name that is too long or no text, an unknown dtype, a size that does not follow from
    shape and dtype, data that overlap or end outside the file, and bytes after the last tensor. A header is read in one
    go, which keeps all other Python threads waiting: a tenth of a second for two megabytes of nothing but brackets, and
    more than in proportion.
    """

    def __init__(
        self, path: Path, error: type[QuantError] = SourceError, most_header_bytes: int = MAX_HEADER_BYTES
    ) -> None:
        self._path = path
        self._error = error
        self._most_header_bytes = most_header_bytes
        header, self._data_offset, data_bytes = self._read_header()
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries = {name: self._entry(name, raw, data_bytes) for name, raw in header.items()}
        self._refuse_overlaps()
        self._refuse_rest(data_bytes)
        try:
            self._map = _map_read_only(path)
        except ValueError as error:  # it was emptied after its header was read
            raise self._refusal(f"cannot be mapped: {error}") from error
        self._bytes = np.frombuffer(self._map, np.uint8)

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as the format spells it: F32, BF16, U8, ..."""
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor in the mapped file; BF16 as uint16 bit patterns."""
        entry = self._entries[name]
        begin, end = self._data_offset + entry.begin, self._data_offset + entry.end
        return np.asarray(self._bytes[begin:end]).view(NUMPY_TYPES[entry.dtype]).reshape(entry.shape)

    def copy(self, name: str) -> NDArray[Any]:
        """What `array` shows, read from the file: touching a map of a file that was shortened meanwhile is fatal."""
        entry = self._entries[name]
        try:
            with self._path.open("rb") as file:
                file.seek(self._data_offset + entry.begin)
                data = file.read(entry.end - entry.begin)
        except OSError as error:
            raise self._refusal(f"cannot be read: {error}") from error
        if len(data) != entry.end - entry.begin:
            raise self._refusal(f"tensor {name}: the file ends in it: truncated")
        return np.frombuffer(data, NUMPY_TYPES[entry.dtype]).reshape(entry.shape)

    def release_pages(self) -> None:
        """Lets go of the pages read so far; what is touched again is read again (madvise(2), MADV_DONTNEED)."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> tuple[dict[str, Any], int, int]:
        """Header, offset of the data in the file, and how many bytes of data there are."""
        try:
            file_bytes = self._path.stat().st_size
            with self._path.open("rb") as file:
                size = int.from_bytes(file.read(SIZE_FIELD_BYTES), "little")
                self._check_header_size(size, file_bytes)
                header = json.loads(file.read(size))
        except (OSError, ValueError, RecursionError) as error:
            raise self._refusal(f"cannot be read: {error}") from error
        if not isinstance(header, dict):
            raise self._refusal("the header is not a JSON object")
        return header, SIZE_FIELD_BYTES + size, file_bytes - SIZE_FIELD_BYTES - size

    def _check_header_size(self, size: int, file_bytes: int) -> None:
        if size > file_bytes - SIZE_FIELD_BYTES:
            raise self._refusal(f"header size {size} in a file of {file_bytes} bytes: truncated or no safetensors")
        if size > self._most_header_bytes:
            raise self._refusal(f"header size {size}: at most {self._most_header_bytes} bytes are read")

    def _check_name(self, name: str) -> None:
        if len(name) > LONGEST_NAME:
            raise self._refusal(f"a tensor has a name of {len(name)} characters; at most {LONGEST_NAME} are allowed")
        if not is_text(name):
            raise self._refusal(f"tensor {name!r}: half a surrogate pair is no text")

    def _entry(self, name: str, raw: Any, data_bytes: int) -> _Entry:
        self._check_name(name)
        try:
            dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise self._refusal(f"tensor {name}: the header entry lacks dtype, shape or data_offsets") from None
        if not isinstance(dtype, str) or dtype not in NUMPY_TYPES:
            known = ", ".join(NUMPY_TYPES)
            raise self._refusal(f"tensor {name}: unknown dtype {reprlib.repr(dtype)}; known: {known}")
        if not all(type(number) is int and 0 <= number < MAX_DIMENSION for number in (*shape, begin, end)):
            told = reprlib.repr([list(shape), [begin, end]])
            raise self._refusal(f"tensor {name}: shape or offsets are not sizes: {told}")
        if not begin <= end <= data_bytes:
            raise self._refusal(
                f"tensor {name}: bytes {begin}..{end} lie outside the {data_bytes} bytes of data: truncated"
            )
        expected = NUMPY_TYPES[dtype].itemsize
        for dimension in shape:
            expected *= dimension
        if end - begin != expected:
            raise self._refusal(f"tensor {name}: {dtype} {list(shape)} takes {expected} bytes, not {end - begin}")
        return _Entry(dtype, shape, begin, end)

    def _refuse_overlaps(self) -> None:
        free_from, before = 0, ""
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin < free_from:
                raise self._refusal(f"tensors {before} and {name} overlap")
            if entry.end > entry.begin:
                free_from, before = entry.end, name

    def _refuse_rest(self, data_bytes: int) -> None:
        end = max((entry.end for entry in self._entries.values()), default=0)
        if end < data_bytes:
            raise self._refusal(f"{data_bytes - end} bytes follow the last tensor, which the format does not allow")

    def _refusal(self, message: str) -> QuantError:
        return self._error(f"{self._path}: {message}")


def _map_read_only(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
