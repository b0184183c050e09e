"""Walks the header of a GGUF file before a reader allocates anything for it.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from dskquant.errors import SourceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
MOST_ELEMENTS = 4_000_000
"""Array elements in the metadata altogether; the largest vocabularies take a fifth of it."""

SMALLEST_KEY_VALUE = 8 + 4 + 1
SMALLEST_TENSOR_INFO = 8 + 4 + 4 + 8
SCALAR_BYTES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    offset: int  # in the data section
    size: int  # bytes


def check_gguf_header(path: Path) -> None:
    """Raises SourceError, naming the tensor or key, unless every length and offset lies inside the file."""
    if path.stat().st_size < len(MAGIC):
        raise SourceError(f"{path}: too short for a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(path, data).check()


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._elements = 0
        self._alignment = 32

    def check(self) -> None:
        magic, version = bytes(self._data[: len(MAGIC)]), self._skip_then_read(len(MAGIC), "<I", "version")
        if magic != MAGIC or version not in VERSIONS:
            raise self._refusal(f"no GGUF file of version {VERSIONS}: magic {magic!r}, version {version}")
        tensors, keys = self._read("<Q", "tensor count"), self._read("<Q", "key count")
        if tensors * SMALLEST_TENSOR_INFO + keys * SMALLEST_KEY_VALUE > self._size:
            raise self._refusal(
                f"{tensors} tensors and {keys} keys do not fit in {self._size} bytes: truncated or damaged"
            )
        for _ in range(keys):
            self._key_value()
        infos = [self._tensor_info() for _ in range(tensors)]
        self._check_data(infos)

    def _key_value(self) -> None:
        key = self._string("a key")
        value_type = self._read("<I", key)
        if key == "general.alignment" and value_type == GGUFValueType.UINT32:
            self._alignment = struct.unpack_from("<I", self._data, self._position)[0] if self._fits(4) else 0
            if self._alignment == 0 or self._alignment & (self._alignment - 1):
                raise self._refusal(f"{key}: {self._alignment} is not a power of two")
        self._value(key, value_type)

    def _value(self, key: str, value_type: int) -> None:
        if value_type == GGUFValueType.STRING:
            self._string(key)
        elif value_type == GGUFValueType.ARRAY:
            self._array(key)
        elif value_type in SCALAR_BYTES:
            self._skip(SCALAR_BYTES[GGUFValueType(value_type)], key)
        else:
            raise self._refusal(f"{key}: unknown value type {value_type}")

    def _array(self, key: str) -> None:
        item_type, length = self._read("<I", key), self._read("<Q", key)
        self._elements += length
        if self._elements > MOST_ELEMENTS:
            raise self._refusal(f"{key}: {length} elements; all arrays together may have {MOST_ELEMENTS}")
        if item_type == GGUFValueType.ARRAY:
            raise self._refusal(f"{key}: arrays of arrays are not supported")
        for _ in range(length):
            self._value(key, item_type)

    def _tensor_info(self) -> _TensorInfo:
        name = self._string("a tensor name")
        dimensions = self._read("<I", name)
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise self._refusal(f"tensor {name}: {dimensions} dimensions; 1 to {MOST_DIMENSIONS} are possible")
        shape = [self._read("<Q", name) for _ in range(dimensions)]
        kind, offset = self._read("<I", name), self._read("<Q", name)
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self._refusal(f"tensor {name}: unknown type {kind}") from None
        if shape[0] % block or 0 in shape:
            raise self._refusal(f"tensor {name}: shape {shape[::-1]} does not fit blocks of {block}")
        elements = 1
        for dimension in shape:
            elements *= dimension
        return _TensorInfo(name, offset, elements // block * block_bytes)

    def _check_data(self, infos: list[_TensorInfo]) -> None:
        start = -(-self._position // self._alignment) * self._alignment
        free_from, before = 0, ""
        for info in sorted(infos, key=lambda info: info.offset):
            if start + info.offset + info.size > self._size:
                raise self._refusal(f"tensor {info.name}: its {info.size} bytes lie outside the file: truncated")
            if info.offset < free_from:
                raise self._refusal(f"tensors {before} and {info.name} overlap")
            free_from, before = info.offset + info.size, info.name

    def _string(self, what: str) -> str:
        length = self._read("<Q", what)
        if not self._fits(length):
            raise self._refusal(f"{what}: {length} bytes of text reach past the end of the file: truncated or damaged")
        text = self._data[self._position : self._position + length]
        self._position += length
        return text.decode("utf-8", "replace")

    def _read(self, form: str, what: str) -> int:
        size = struct.calcsize(form)
        if not self._fits(size):
            raise self._refusal(f"{what}: the file ends in the header: truncated")
        value: int = struct.unpack_from(form, self._data, self._position)[0]
        self._position += size
        return value

    def _skip(self, size: int, what: str) -> None:
        if not self._fits(size):
            raise self._refusal(f"{what}: the file ends in the header: truncated")
        self._position += size

    def _skip_then_read(self, size: int, form: str, what: str) -> int:
        self._skip(size, what)
        return self._read(form, what)

    def _fits(self, size: int) -> bool:
        return self._position + size <= self._size

    def _refusal(self, message: str) -> SourceError:
        return SourceError(f"{self._path}: {message}")
