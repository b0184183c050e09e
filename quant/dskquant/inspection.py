"""What is told of a model store, a parameter set or a safetensors file; nothing of it is run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dskquant import parameter_set, set_manifest
from dskquant.bits import NO_BITS, Bits, tensor_bits, unquantized_bits, weights_in
from dskquant.errors import ParameterSetError, StoreError
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.parameter_set import Codes, ParameterSet
from dskquant.scheme import TensorScheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, StoreManifest, file_sha256
from dskquant.validation import check_tensors

ANY_SHAPE = (1, 1)
"""Stands for the shapes of tensors that are told together."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file that a manifest names."""

    name: str
    bytes: int | None  # None: it is missing
    sha256: str  # as the manifest says
    whole: bool | None  # it has that digest; None: not verified


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """The tensors of a model that are quantized alike, or not at all."""

    role: str
    group_size: int | None  # 0: a whole row; None: not quantized
    symmetric: bool
    always_residual: bool
    int8_plane: bool
    tensors: int | None
    weights: int
    bits_per_weight: Bits


@dataclass(frozen=True, slots=True)
class SetReport:
    """A parameter set."""

    path: str
    model_id: str
    hash: str
    weights_sha256: str
    codes: str  # "stored" or "derived"
    expected_kl: dict[str, float]  # mode -> nats per token, on the text it was made with
    provenance: dict[str, Any]
    broken_rule: str | None  # the first rule its tensors break; None: none, or not verified
    files: list[ListedFile]
    schemes: list[SchemeGroup]
    weights: int
    bits_per_weight: Bits


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A model store with its parameter sets."""

    path: str
    manifest: StoreManifest
    files: list[ListedFile]
    parameter_sets: list[SetReport]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class FileReport:
    """A safetensors file."""

    path: str
    metadata: dict[str, str]
    tensors: list[StoredTensor]


Report = StoreReport | SetReport | FileReport


def inspect(path: Path, verify: bool) -> Report:
    """What is at `path`. Raises StoreError where it is no store, set or safetensors file, or cannot be read."""
    if path.name == MANIFEST:
        path = path.parent
    if path.is_file():
        return _inspect_file(path)
    if _is_parameter_set(path):
        return _inspect_set(path, None, verify)
    manifest = StoreManifest.read(path)
    sets = sorted(found.parent for found in (path / DEFAULT_PARAMETER_SET.parent).glob(f"*/{MANIFEST}"))
    return StoreReport(
        str(path),
        manifest,
        _listed_files(path, manifest.sha256, verify),
        [_inspect_set(found, manifest, verify) for found in sets],
    )


def _is_parameter_set(path: Path) -> bool:
    """Told by what its manifest holds, for a set may lie anywhere; a damaged manifest is for others to refuse."""
    try:
        return "weights_sha256" in json.loads(set_manifest.read_bytes(path / MANIFEST))
    except (ParameterSetError, ValueError, TypeError, RecursionError):
        return False


def _inspect_file(path: Path) -> FileReport:
    try:
        file = MappedSafetensors(path, StoreError)
    except StoreError as error:
        if path.suffix == ".safetensors":
            raise
        raise StoreError(f"{path}: not a model store, parameter set or safetensors file") from error
    tensors = [StoredTensor(name, file.dtype(name), file.shape(name), file.array(name).nbytes) for name in file.names]
    return FileReport(str(path), file.metadata, tensors)


def _inspect_set(path: Path, store: StoreManifest | None, verify: bool) -> SetReport:
    parameters = parameter_set.read(path)
    schemes = _grouped(parameters)
    if store is not None:
        schemes.append(_not_quantized(store, sum(group.weights for group in schemes)))
    weights = sum(group.weights for group in schemes)
    files = _listed_files(path, parameters.sha256, verify)
    return SetReport(
        str(path),
        parameters.model_id,
        parameters.hash,
        parameters.weights_sha256,
        parameters.codes.value,
        {mode.value: kl for mode, kl in parameters.expected_kl.items()},
        parameters.provenance,
        _broken_rule(parameters) if verify and all(file.whole for file in files) else None,
        files,
        schemes,
        weights,
        sum((group.bits_per_weight * group.weights for group in schemes), NO_BITS) / max(weights, 1),
    )


def _broken_rule(parameters: ParameterSet) -> str | None:
    try:
        check_tensors(parameters)
    except ParameterSetError as error:
        return f"{error.rule}: {error}"
    return None


def _listed_files(directory: Path, sha256: Mapping[str, str], verify: bool) -> list[ListedFile]:
    files = []
    for name, digest in sha256.items():
        path = directory / name
        present = path.is_file()
        whole = file_sha256(path) == digest if verify and present else None
        files.append(ListedFile(name, path.stat().st_size if present else None, digest, whole))
    return files


def _grouped(parameters: ParameterSet) -> list[SchemeGroup]:
    alike: dict[TensorScheme, list[TensorScheme]] = {}
    for scheme in parameters.tensors.values():
        alike.setdefault(replace(scheme, shape=ANY_SHAPE), []).append(scheme)
    return [_group(schemes, parameters.codes) for schemes in alike.values()]


def _group(schemes: list[TensorScheme], codes: Codes) -> SchemeGroup:
    first, weights = schemes[0], sum(map(weights_in, schemes))
    return SchemeGroup(
        first.role.value,
        first.group_size,
        first.symmetric,
        first.always_residual,
        first.int8_plane,
        len(schemes),
        weights,
        sum((tensor_bits(scheme, codes) for scheme in schemes), NO_BITS) / weights,
    )


def _not_quantized(store: StoreManifest, quantized: int) -> SchemeGroup:
    """Norms and biases; they stay in the IR."""
    weights = store.parameters - quantized
    bits = unquantized_bits(store, quantized) / max(weights, 1)
    return SchemeGroup("norms, biases", None, False, False, False, None, weights, bits)


def problems(report: Report) -> Iterable[str]:
    """What is wrong with what was looked at."""
    if isinstance(report, FileReport):
        return
    for file in report.files:
        if file.bytes is None:
            yield f"{file.name} is missing"
        elif file.whole is False:
            yield f"{file.name} is damaged"
    if isinstance(report, SetReport) and report.broken_rule is not None:
        yield report.broken_rule
    if isinstance(report, StoreReport):
        for parameters in report.parameter_sets:
            yield from (f"{Path(parameters.path).name}: {problem}" for problem in problems(parameters))
            if parameters.weights_sha256 != report.manifest.weights_sha256:
                yield f"{Path(parameters.path).name}: made for other weights"
