"""The float weights of a store, mapped from the .bin of its OpenVINO IR."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from dskquant.decoder import Shape
from dskquant.engines.onnxruntime.ir_names import float_constants
from dskquant.errors import StoreError
from dskquant.floats import NUMPY_FLOATS, to_float32
from dskquant.store import IR_BIN, IR_XML


class StoredWeights:
    """The weights of a store by the names that Hugging Face gives them."""

    def __init__(self, store: Path) -> None:
        """Raises StoreError when the IR is missing or damaged."""
        self._path = store / IR_BIN
        try:
            self._constants = float_constants(store / IR_XML)
            with self._path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, KeyError, ElementTree.ParseError) as error:
            raise StoreError(f"{store}: not a readable OpenVINO IR: {error}") from error

    def float32(self, name: str, shape: Shape) -> NDArray[np.float32]:
        """The weight `name`, widened to float32; the mapped file itself where it is stored so.

        Raises StoreError when it is missing, of another shape, or outside the file.
        """
        data = self._constants.get(name)
        if data is None:
            raise StoreError(f"{self._path}: {name} is missing, or goes by another name; convert the model again")
        found = [int(size) for size in data["shape"].split(",")]
        if [size for size in found if size > 1] != [size for size in shape if size > 1]:
            raise StoreError(f"{self._path}: {name} is {found}, expected {list(shape)}")
        return to_float32(self._values(name, data, math.prod(shape)), data["element_type"]).reshape(shape)

    def _values(self, name: str, data: dict[str, str], count: int) -> NDArray[Any]:
        dtype = NUMPY_FLOATS[data["element_type"]]
        begin = int(data["offset"])
        if begin + count * dtype.itemsize > len(self._bytes):
            raise StoreError(f"{self._path}: {name} ends outside the file: truncated")
        # Exports do not align what they hold: slices of bytes, unlike np.frombuffer, may begin anywhere.
        return np.frombuffer(self._bytes, np.uint8, count * dtype.itemsize, begin).view(dtype)
