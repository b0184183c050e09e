"""Writes parameter sets: the default one of a store, by rounding to nearest, and the pieces others are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dskquant.engines import load_engine
from dskquant.engines.protocol import WeightSource
from dskquant.errors import SchemeError, StoreError
from dskquant.parameter_set import Codes, MatrixReader, ParameterSet, Progress
from dskquant.planes import Float32, QuantizedMatrix, pack_u4, quantize, quantize_planes, rounded
from dskquant.scheme import Role, Scheme, TensorScheme
from dskquant.set_layout import Plane, planes_of
from dskquant.store import StoreManifest, file_sha256
from dskquant.validation import validate

FILE_BYTES = 512 << 20
READABLE = 0o644

Tensors = dict[str, NDArray[Any]]
Grid = tuple[NDArray[np.float16], NDArray[np.uint8]]  # scales and zero-points [N, G]


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


def complete(parameters: ParameterSet, store: Path, destination: Path, progress: Progress) -> ParameterSet:
    """Writes a set whose codes are derived, with its codes, into the new directory `destination`.

    A code is the nearest to the stored weight that the scale, as float16, and the zero-point of its group have; the
    residual plane rounds what the base plane leaves. The result follows from the set and the weights alone, bit by bit.
    Raises ParameterSetError when the set breaks a rule of `dskquant.validation`, StoreError when it has its codes.
    """
    if parameters.codes is Codes.STORED:
        raise StoreError(f"{parameters.directory}: holds its codes already")
    validate(parameters, store)
    matrices = parameters.matrices()
    weights = load_engine("openvino").weights(store)
    destination.mkdir(parents=True)
    writer = SetWriter(destination)
    for done, weight in enumerate(weights):
        progress(f"deriving codes of {weight.name}", done, len(weights))
        writer.add(derive_codes(weight, planes_of(weight.name, parameters.tensors[weight.name]), matrices))
    writer.flush()
    progress("codes derived", len(weights), len(weights))
    whole = replace(
        parameters,
        directory=destination,
        sha256=writer.sha256,
        codes=Codes.STORED,
        provenance=parameters.provenance | {"completed_from": parameters.hash},
    )
    return whole.write_manifest()


def derive_codes(weight: WeightSource, planes: Mapping[str, Plane], matrices: MatrixReader) -> Tensors:
    """The arrays of all planes of a weight matrix: grids as `matrices` has them, codes rounded to them."""
    grids = {name: matrices.grid(plane) for name, plane in planes.items()}
    pieces: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in planes}
    first_row = 0
    for weights in weight.pieces():
        rows = slice(first_row, first_row + len(weights))
        for name, codes in _codes_of_rows(weights, rows, planes, grids):
            pieces[name].append(codes)
        first_row = rows.stop
    tensors: Tensors = {}
    for name, plane in planes.items():
        tensors[plane.codes] = np.concatenate(pieces[name])
        tensors[plane.scales], tensors[plane.zero_points] = grids[name]
    return tensors


def _codes_of_rows(
    weights: Float32, rows: slice, planes: Mapping[str, Plane], grids: Mapping[str, Grid]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """The codes of `weights`, which are these rows of their matrix, in each plane, packed as the files pack them."""
    left = weights
    for name, plane in planes.items():  # base before residual
        scales, zero_points = grids[name]
        matrix = rounded(left if name == "residual" else weights, scales[rows], zero_points[rows], plane.bits)
        if name == "base":
            left = weights - matrix.dequantized()
        yield name, pack_u4(matrix.codes) if plane.bits == 4 else matrix.codes


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


def parts_of(prefix: str, matrix: QuantizedMatrix, codes: NDArray[np.uint8] | None) -> Tensors:
    """The arrays of a plane; without `codes`, for a set whose codes are derived, its scales and zero-points alone."""
    grid: Tensors = {f"{prefix}scales": matrix.scales, f"{prefix}zero_points": matrix.zero_points}
    return grid if codes is None else {f"{prefix}codes": codes} | grid


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
