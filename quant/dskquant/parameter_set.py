"""Parameter sets: the scales, zero-points and codes of every quantized tensor of a model, with a manifest.

    SET/
      manifest.json              format, the weights it was made for, the scheme of each tensor, SHA-256 of each file
      planes-00001.safetensors   the tensors, in files of about 512 MiB

A linear layer W [N, K] has `W.base.*` and `W.residual.*`, and `W.int8.*` if the set was made with an 8-bit plane; an
8-bit tensor has `W.*`. Here * is
`codes` (uint8; two 4-bit codes a byte [N, K/2], low half first, or [N, K] for 8 bit), `scales` (float16 [N, G]) and
`zero_points` (uint8 [N, G], one a byte). A set whose codes are "derived" has scales and zero-points alone; its codes
follow from the stored weights by rounding (`dskquant.set_writer.complete`).
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import SchemeError, StoreError
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.modes import PrecisionMode
from dskquant.planes import group_length
from dskquant.scheme import LayerRule, Role, TensorScheme
from dskquant.store import MANIFEST, file_sha256

FORMAT_VERSION = 2

Progress = Callable[[str, int, int], None]
"""Called with what is done, how many of its parts are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class MappedMatrix:
    """A quantized matrix as it lies in the file: codes packed as the file packs them, all of it mapped, not read."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    zero_points: NDArray[np.uint8]


class Codes(enum.Enum):
    """Whether a set holds its codes."""

    STORED = "stored"
    DERIVED = "derived"  # by rounding the stored weights with the scales and zero-points of the set


@dataclass(frozen=True, slots=True)
class ParameterSet:
    """A parameter set on disk; its tensors are mapped when asked for."""

    directory: Path
    model_id: str
    weights_sha256: str  # of the stored weights it was made for
    tensors: dict[str, TensorScheme]
    sha256: dict[str, str]  # file name -> hex digest
    codes: Codes = Codes.STORED
    expected_kl: dict[PrecisionMode, float] = field(default_factory=dict)  # nats per token, on held-out text
    provenance: dict[str, Any] = field(default_factory=dict)
    hash: str = ""  # its identity: hex SHA-256 of the manifest file, which holds the digests of the others

    def with_rules(self, rules: Sequence[LayerRule]) -> ParameterSet:
        """The set with the precisions of its linear layers as `rules` say; of several rules that match the last counts.

        Raises SchemeError for a rule that matches no linear layer.
        """
        tensors = dict(self.tensors)
        for rule in rules:
            matching = [name for name, scheme in tensors.items() if scheme.role is Role.LINEAR and rule.matches(name)]
            if not matching:
                linear = [name for name, scheme in tensors.items() if scheme.role is Role.LINEAR]
                raise SchemeError(
                    f"no linear layer matches {rule.match!r}; there are {', '.join(linear[:7])} and so on"
                )
            always_residual = rule.precision is PrecisionMode.INT8
            tensors |= {name: replace(tensors[name], always_residual=always_residual) for name in matching}
        return replace(self, tensors=tensors)

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

    def write_manifest(self) -> ParameterSet:
        """Writes the manifest; returns the set with its hash."""
        text = self._manifest_text().encode()
        (self.directory / MANIFEST).write_bytes(text)
        return replace(self, hash=_sha256(text))

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
            "codes": self.codes.value,
            "expected_kl": {mode.value: kl for mode, kl in self.expected_kl.items()},
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
        text = path.read_bytes()
        raw = json.loads(text)
        if raw["format_version"] != FORMAT_VERSION:
            raise StoreError(f"{path}: format_version {raw['format_version']}; this version reads {FORMAT_VERSION}")
        tensors = {name: _read_scheme(item) for name, item in raw["tensors"].items()}
        files = {_plain_file_name(name): str(digest) for name, digest in raw["sha256"].items()}
        return ParameterSet(
            directory,
            raw["model_id"],
            raw["weights_sha256"],
            tensors,
            files,
            Codes(raw["codes"]),
            {PrecisionMode(mode): float(kl) for mode, kl in raw["expected_kl"].items()},
            raw["provenance"],
            _sha256(text),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SchemeError) as error:
        raise StoreError(f"{path}: not a readable parameter set: {type(error).__name__}: {error}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
