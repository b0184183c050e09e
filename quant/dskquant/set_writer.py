"""Writes parameter sets: the default one of a store, by rounding to nearest, and the pieces others are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dskquant.engines import load_engine
from dskquant.engines.protocol import WeightSource
from dskquant.errors import SchemeError
from dskquant.parameter_set import ParameterSet, Progress
from dskquant.planes import Float32, QuantizedMatrix, pack_u4, quantize, quantize_planes
from dskquant.scheme import Role, Scheme, TensorScheme
from dskquant.store import StoreManifest, file_sha256

FILE_BYTES = 512 << 20
READABLE = 0o644

Tensors = dict[str, NDArray[Any]]


def create(store: Path, scheme: Scheme, destination: Path, progress: Progress) -> ParameterSet:
    """Quantizes the weights of `store` to nearest by `scheme` and writes them into the new directory `destination`.

    Memory is bounded by one file of the set and one tensor. Raises SchemeError, naming the tensor, where the scheme
    does not fit one, and StoreError when the store cannot be read.
    """
    manifest = StoreManifest.read(store)
    weights = load_engine("openvino").weights(store)
    destination.mkdir(parents=True)
    writer = SetWriter(destination)
    tensors: dict[str, TensorScheme] = {}
    for done, weight in enumerate(weights):
        progress(f"quantizing {weight.name}", done, len(weights))
        tensors[weight.name] = scheme.for_tensor(weight.name, weight.role, weight.shape)
        writer.add(quantize_tensor(weight, tensors[weight.name]))
    writer.flush()
    progress("quantized", len(weights), len(weights))
    provenance = {"method": "round to nearest"}
    made = ParameterSet(
        destination, manifest.model_id, manifest.weights_sha256, tensors, writer.sha256, provenance=provenance
    )
    return made.write_manifest()


def quantize_tensor(weight: WeightSource, scheme: TensorScheme) -> Tensors:
    """The tensors of the set that stand for one weight matrix."""
    try:
        pieces = [_quantize_piece(rows, scheme) for rows in weight.pieces()]
    except SchemeError as error:
        raise SchemeError(f"{weight.name}: {error}") from error
    joined = {part: np.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}
    return {f"{weight.name}.{part}": array for part, array in joined.items()}


def _quantize_piece(rows: Float32, scheme: TensorScheme) -> Tensors:
    if scheme.role is not Role.LINEAR:
        matrix = quantize(rows, 8, scheme.group_size, scheme.symmetric)
        return parts_of("", matrix, matrix.codes)
    base, residual = quantize_planes(rows, scheme.group_size, scheme.symmetric)
    parts = parts_of("base.", base, pack_u4(base.codes)) | parts_of("residual.", residual, pack_u4(residual.codes))
    if scheme.int8_plane:
        exact = quantize(rows, 8, scheme.group_size, scheme.symmetric)
        parts |= parts_of("int8.", exact, exact.codes)
    return parts


def parts_of(prefix: str, matrix: QuantizedMatrix, codes: NDArray[np.uint8]) -> Tensors:
    return {
        f"{prefix}codes": codes,
        f"{prefix}scales": matrix.scales,
        f"{prefix}zero_points": matrix.zero_points,
    }


class SetWriter:
    """Collects tensors and writes a file whenever enough have come together."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: Tensors = {}
        self.sha256: dict[str, str] = {}

    def add(self, tensors: Tensors) -> None:
        self._pending.update(tensors)
        if sum(array.nbytes for array in self._pending.values()) >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        path = self._directory / f"planes-{len(self.sha256) + 1:05d}.safetensors"
        save_file(self._pending, path)
        path.chmod(READABLE)  # `save_file` makes it for its owner alone
        self.sha256[path.name] = file_sha256(path)
        self._pending = {}
