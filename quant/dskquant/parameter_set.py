"""Parameter sets: the scales, zero-points and codes of every quantized tensor of a model, with a manifest.

    SET/
      manifest.json              format, the weights it was made for, the scheme of each tensor, SHA-256 of each file
      planes-00001.safetensors   the tensors, in files of about 512 MiB

A linear layer W [N, K] has `W.base.*` and `W.residual.*`, and `W.int8.*` if the set was made with an 8-bit plane; an
8-bit tensor has `W.*`. Here * is
`codes` (uint8; two 4-bit codes a byte [N, K/2], low half first, or [N, K] for 8 bit), `scales` (float16 [N, G]) and
`zero_points` (uint8 [N, G], one a byte).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dskquant.engines import load_engine
from dskquant.engines.protocol import WeightSource
from dskquant.errors import SchemeError, StoreError
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.planes import Float32, QuantizedMatrix, group_length, pack_u4, quantize, quantize_planes
from dskquant.scheme import Role, Scheme, TensorScheme
from dskquant.store import MANIFEST, StoreManifest, file_sha256

FORMAT_VERSION = 1
FILE_BYTES = 512 << 20

Tensors = dict[str, NDArray[Any]]
Progress = Callable[[str, int, int], None]
"""Called with what is done, how many of its parts are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class MappedMatrix:
    """A quantized matrix as it lies in the file: codes packed as the file packs them, all of it mapped, not read."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    zero_points: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ParameterSet:
    """A parameter set on disk; its tensors are mapped when asked for."""

    directory: Path
    model_id: str
    weights_sha256: str  # of the stored weights it was made for
    tensors: dict[str, TensorScheme]
    sha256: dict[str, str]  # file name -> hex digest
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """Identity of the set: hex SHA-256 over its manifest, which holds the digests of its files."""
        return hashlib.sha256(self._manifest_text().encode()).hexdigest()

    def matrices(self) -> MatrixReader:
        """Opens the files of the set."""
        return MatrixReader([MappedSafetensors(self.directory / name, StoreError) for name in self.sha256])

    def verify(self) -> None:
        """Reads every file. Raises StoreError for the first one that is missing or not the one the manifest names."""
        for name, expected in self.sha256.items():
            path = self.directory / name
            if not path.is_file():
                raise StoreError(f"{path}: missing")
            if file_sha256(path) != expected:
                raise StoreError(f"{path}: damaged: its SHA-256 is not the one in {MANIFEST}")

    def write_manifest(self) -> None:
        (self.directory / MANIFEST).write_text(self._manifest_text(), encoding="utf-8")

    def _manifest_text(self) -> str:
        tensors = {
            name: {
                "role": scheme.role.value,
                "shape": list(scheme.shape),
                "bits": scheme.bits,
                "group_size": scheme.group_size,
                "symmetric": scheme.symmetric,
                "always_residual": scheme.always_residual,
                "int8_plane": scheme.int8_plane,
            }
            for name, scheme in self.tensors.items()
        }
        manifest = {
            "format_version": FORMAT_VERSION,
            "model_id": self.model_id,
            "weights_sha256": self.weights_sha256,
            "tensors": tensors,
            "sha256": self.sha256,
            "provenance": self.provenance,
        }
        return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


class MatrixReader:
    """Looks matrices up by tensor name in the mapped files of a set."""

    def __init__(self, files: Sequence[MappedSafetensors]) -> None:
        self._mapped = files
        self._files = {name: file for file in files for name in file.names}

    def plane(self, tensor: str, plane: str, scheme: TensorScheme) -> MappedMatrix:
        """The `plane` ("base", "residual" or "int8") of a linear layer. Raises StoreError when the set lacks it."""
        if plane == "int8" and not scheme.int8_plane:
            raise StoreError(f"the parameter set has no 8-bit plane of {tensor}: convert the model with --int8-plane")
        return self._matrix(f"{tensor}.{plane}", scheme, 8 if plane == "int8" else 4)

    def eight_bit(self, tensor: str, scheme: TensorScheme) -> MappedMatrix:
        """An embedding or lm_head. Raises StoreError when the set lacks it."""
        return self._matrix(tensor, scheme, 8)

    def release_pages(self) -> None:
        """Lets go of what was read of the files so far; it is read again when it is touched."""
        for file in self._mapped:
            file.release_pages()

    def _matrix(self, prefix: str, scheme: TensorScheme, bits: int) -> MappedMatrix:
        rows, columns = scheme.shape
        groups = columns // group_length(columns, scheme.group_size)
        return MappedMatrix(
            self._array(f"{prefix}.codes", "U8", (rows, columns * bits // 8)),
            self._array(f"{prefix}.scales", "F16", (rows, groups)),
            self._array(f"{prefix}.zero_points", "U8", (rows, groups)),
        )

    def _array(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        file = self._files.get(name)
        if file is None:
            raise StoreError(f"the parameter set has no tensor {name}")
        if (file.dtype(name), file.shape(name)) != (dtype, shape):
            found = f"{file.dtype(name)} {list(file.shape(name))}"
            raise StoreError(f"tensor {name} of the parameter set is {found}, not {dtype} {list(shape)}")
        return file.array(name)


def read(directory: Path) -> ParameterSet:
    """Reads the manifest of a set. Raises StoreError when it is missing, damaged or of another version."""
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format_version"] != FORMAT_VERSION:
            raise StoreError(f"{path}: format_version {raw['format_version']}; this version reads {FORMAT_VERSION}")
        tensors = {name: _read_scheme(item) for name, item in raw["tensors"].items()}
        files = {_plain_file_name(name): str(digest) for name, digest in raw["sha256"].items()}
        return ParameterSet(directory, raw["model_id"], raw["weights_sha256"], tensors, files, raw["provenance"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SchemeError) as error:
        raise StoreError(f"{path}: not a readable parameter set: {type(error).__name__}: {error}") from error


def _plain_file_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file of the set")
    return name


def _read_scheme(item: dict[str, Any]) -> TensorScheme:
    return TensorScheme(
        Role(item["role"]),
        tuple(item["shape"]),
        item["group_size"],
        item["symmetric"],
        item["always_residual"],
        item["int8_plane"],
    )


def create(store: Path, scheme: Scheme, destination: Path, progress: Progress) -> ParameterSet:
    """Quantizes the weights of `store` to nearest by `scheme` and writes them into the new directory `destination`.

    Memory is bounded by one file of the set and one tensor. Raises SchemeError, naming the tensor, where the scheme
    does not fit one, and StoreError when the store cannot be read.
    """
    manifest = StoreManifest.read(store)
    weights = load_engine("openvino").weights(store)
    destination.mkdir(parents=True)
    writer = _SetWriter(destination)
    tensors: dict[str, TensorScheme] = {}
    for done, weight in enumerate(weights):
        progress(f"quantizing {weight.name}", done, len(weights))
        tensors[weight.name] = scheme.for_tensor(weight.name, weight.role, weight.shape)
        writer.add(quantize_tensor(weight, tensors[weight.name]))
    writer.flush()
    progress("quantized", len(weights), len(weights))
    provenance = {"method": "round to nearest"}
    made = ParameterSet(destination, manifest.model_id, manifest.weights_sha256, tensors, writer.sha256, provenance)
    made.write_manifest()
    return made


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
        return _parts("", matrix, matrix.codes)
    base, residual = quantize_planes(rows, scheme.group_size, scheme.symmetric)
    parts = _parts("base.", base, pack_u4(base.codes)) | _parts("residual.", residual, pack_u4(residual.codes))
    if scheme.int8_plane:
        exact = quantize(rows, 8, scheme.group_size, scheme.symmetric)
        parts |= _parts("int8.", exact, exact.codes)
    return parts


def _parts(prefix: str, matrix: QuantizedMatrix, codes: NDArray[np.uint8]) -> Tensors:
    return {
        f"{prefix}codes": codes,
        f"{prefix}scales": matrix.scales,
        f"{prefix}zero_points": matrix.zero_points,
    }


class _SetWriter:
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
        self.sha256[path.name] = file_sha256(path)
        self._pending = {}
