"""Parameter sets: the scales, zero-points and codes of every quantized tensor of a model, with a manifest.

    SET/
      manifest.json              format, the weights it was made for, the scheme of each tensor, SHA-256 of each file
      planes-00001.safetensors   the tensors, in files of about 512 MiB

The files of tensors are named `*.safetensors`; the manifest and the header of each of them have 2 MiB at most.
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
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant import set_manifest
from dskquant.errors import ParameterSetError, ParameterSetMissingError, SchemeError, StoreError
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule, Role, TensorScheme
from dskquant.set_layout import Plane, planes_of
from dskquant.store import MANIFEST, file_sha256

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
        """Opens the files of the set. Raises ParameterSetError for the first that is missing or damaged."""
        return MatrixReader(self.directory, {name: self._mapped(name) for name in self.sha256})

    def verify(self, before_piece: Callable[[], None] = lambda: None) -> None:
        """Reads every file. Raises ParameterSetError for the first that is missing or not the one of the manifest.

        `before_piece` is called again and again meanwhile; what it raises ends it.
        """
        for name, expected in self.sha256.items():
            path = self._present(name)
            try:
                found = file_sha256(path, before_piece)
            except OSError as error:
                raise _unreadable(path, error) from error
            if found != expected:
                message = f"{path}: damaged: its SHA-256 is not the one in {MANIFEST}"
                raise ParameterSetError(message, rule="hash-mismatch")

    def _mapped(self, name: str) -> MappedSafetensors:
        path = self._present(name)
        try:
            return MappedSafetensors(path, StoreError, set_manifest.MOST_BYTES)
        except StoreError as error:
            raise ParameterSetError(str(error), rule="file-truncated") from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def _present(self, name: str) -> Path:
        path = self.directory / name
        try:
            if stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
                with path.open("rb"):
                    return path
        except FileNotFoundError:
            raise ParameterSetMissingError(f"{path}: missing") from None
        except OSError as error:
            raise _unreadable(path, error) from error
        raise ParameterSetError(f"{path}: is not a regular file", rule="file-unreadable")

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
            "format_version": set_manifest.FORMAT_VERSION,
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

    def __init__(self, directory: Path, mapped: Mapping[str, MappedSafetensors]) -> None:
        self._directory = directory
        self._mapped = mapped
        self._files = {name: file for file in mapped.values() for name in file.names}

    def names(self) -> Iterator[tuple[str, str]]:
        """What is in the files: name of the file, name of the array."""
        return ((file_name, name) for file_name, file in self._mapped.items() for name in file.names)

    def plane(self, tensor: str, plane: str, scheme: TensorScheme) -> MappedMatrix:
        """The `plane` ("base", "residual" or "int8") of a linear layer. Raises StoreError when the set lacks it."""
        if plane == "int8" and not scheme.int8_plane:
            raise StoreError(f"the parameter set has no 8-bit plane of {tensor}: convert the model with --int8-plane")
        return self._matrix_of(tensor, plane, scheme)

    def eight_bit(self, tensor: str, scheme: TensorScheme) -> MappedMatrix:
        """An embedding or lm_head. Raises StoreError when the set lacks it."""
        return self._matrix_of(tensor, "", scheme)

    def _matrix_of(self, tensor: str, plane: str, scheme: TensorScheme) -> MappedMatrix:
        planes = planes_of(tensor, scheme)
        if plane not in planes:
            raise ParameterSetError(
                f"{self._directory}: tensor {tensor}: role {scheme.role.value} is not what the model uses it for",
                rule="role",
                tensor=tensor,
            )
        return self.matrix(planes[plane])

    def matrix(self, plane: Plane) -> MappedMatrix:
        """Raises ParameterSetError when the set lacks an array of `plane` or has it otherwise."""
        names = plane.codes, plane.scales, plane.zero_points
        return MappedMatrix(*(self._file(plane, name).array(name) for name in names))

    def grid(self, plane: Plane) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
        """Copies of scales and zero-points [N, G], which it does no harm to read while others write to the files."""
        return self._copy(plane, plane.scales), self._copy(plane, plane.zero_points)

    def check(self, plane: Plane, names: Iterable[str]) -> None:
        """Raises ParameterSetError for the first of these arrays of `plane` that the set lacks or has otherwise."""
        for name in names:
            self._file(plane, name)

    def release_pages(self) -> None:
        """Lets go of what was read of the files so far; it is read again when it is touched."""
        for file in self._mapped.values():
            file.release_pages()

    def _copy(self, plane: Plane, name: str) -> NDArray[Any]:
        try:
            return self._file(plane, name).copy(name)
        except ParameterSetError:
            raise
        except StoreError as error:
            raise ParameterSetError(str(error), rule="file-truncated", tensor=plane.tensor) from error

    def _file(self, plane: Plane, name: str) -> MappedSafetensors:
        """The file that holds the array `name` as `plane` says it is."""
        file = self._files.get(name)
        if file is None:
            raise self._refusal(plane, "array-missing", f"the parameter set has no tensor {name}")
        found, (dtype, shape) = (file.dtype(name), file.shape(name)), plane.arrays[name]
        if found != (dtype, shape):
            words = f"{found[0]} {list(found[1])}, not {dtype} {list(shape)}"
            rule = "array-shape" if found[0] == dtype else "array-dtype"
            raise self._refusal(plane, rule, f"tensor {name} of the parameter set is {words}")
        return file

    def _refusal(self, plane: Plane, rule: str, message: str) -> ParameterSetError:
        return ParameterSetError(f"{self._directory}: {message}", rule=rule, tensor=plane.tensor)


def read(path: Path) -> ParameterSet:
    """Reads the manifest of the set in the directory `path`, which may also be the path of the manifest itself.

    Raises ParameterSetMissingError when nothing is there, ParameterSetError when it is damaged or of another version.
    """
    directory = path.parent if path.name == MANIFEST else path
    manifest = directory / MANIFEST
    text = set_manifest.read_bytes(manifest)
    raw = set_manifest.parse(manifest, text)
    return ParameterSet(
        directory,
        raw["model_id"],
        raw["weights_sha256"],
        {name: set_manifest.tensor_scheme(manifest, name, item) for name, item in raw["tensors"].items()},
        raw["sha256"],
        _codes(manifest, raw["codes"]),
        set_manifest.expected_kl(manifest, raw["expected_kl"]),
        raw["provenance"],
        _sha256(text),
    )


def _unreadable(path: Path, error: OSError) -> ParameterSetError:
    return ParameterSetError(f"{path}: cannot be read: {error.strerror}", rule="file-unreadable")


def _codes(manifest: Path, word: str) -> Codes:
    known = {codes.value: codes for codes in Codes}
    if word not in known:
        raise ParameterSetError(f"{manifest}: codes {word!r}; allowed: {', '.join(known)}", rule="manifest-unreadable")
    return known[word]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
