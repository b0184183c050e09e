"""`dskquant inspect STORE|SET|FILE`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from dskquant import parameter_set
from dskquant.errors import StoreError
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.parameter_set import ParameterSet
from dskquant.planes import group_length
from dskquant.scheme import Role, TensorScheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, StoreManifest, file_sha256

ANY_SHAPE = (1, 1)
"""Stands for the shapes of tensors that are told together."""


DESCRIPTION = """\
Shows what a model store, a parameter set or a safetensors file holds: identity and shape, files with their sizes and
SHA-256, tensors by scheme, and bits per weight with everything counted (scales, zero-points, embeddings, and the
weights that are not quantized). Of a store or a set its manifest.json may be given too. Nothing is run."""

EXAMPLES = """\
examples:
  dskquant inspect models/smollm2
  dskquant inspect models/smollm2 --verify
  dskquant inspect models/smollm2/parameter_sets/default --json
  dskquant inspect model-00001-of-00002.safetensors

exit status: 0 done, 1 refused, or a file is missing or (--verify) damaged, 2 wrong usage"""

SCALE_BITS = 16 + 8  # of a group: its scale and its zero-point, as the files keep them
FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32}
USES = ("int4", "int8", "stored")
DIGITS_SHOWN = 16
TITLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
FACTS = {"parameters": "weights", "bos_token_id": "begin token", "end_token_ids": "end tokens", "sha256": ""}
"""Headings of the keys of a store's manifest that need another; an empty one has a table of its own."""


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
    bits_per_weight: dict[str, float]  # computing in "int4" and in "int8" (base + residual), and "stored"


@dataclass(frozen=True, slots=True)
class SetReport:
    """A parameter set."""

    path: str
    model_id: str
    hash: str
    weights_sha256: str
    provenance: dict[str, Any]
    files: list[ListedFile]
    schemes: list[SchemeGroup]
    weights: int
    bits_per_weight: dict[str, float]


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


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="show what a model store, a parameter set or a safetensors file holds",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="STORE|SET|FILE", type=Path)
    parser.add_argument("--verify", action="store_true", help="read every file and compare its SHA-256")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises StoreError for what cannot be read, and, after it is shown, for files that are missing or damaged."""
    report = inspect(options.path, options.verify)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    if problems := list(_problems(report)):
        raise StoreError(f"{options.path}: {'; '.join(problems)}")


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
        return "weights_sha256" in json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, TypeError):
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
    return SetReport(
        str(path),
        parameters.model_id,
        parameters.hash,
        parameters.weights_sha256,
        parameters.provenance,
        _listed_files(path, parameters.sha256, verify),
        schemes,
        weights,
        {use: sum(group.bits_per_weight[use] * group.weights for group in schemes) / max(weights, 1) for use in USES},
    )


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
    return [_group(schemes) for schemes in alike.values()]


def _group(schemes: list[TensorScheme]) -> SchemeGroup:
    first, weights = schemes[0], sum(scheme.shape[0] * scheme.shape[1] for scheme in schemes)
    bits = [_bits(scheme) for scheme in schemes]
    return SchemeGroup(
        first.role.value,
        first.group_size,
        first.symmetric,
        first.always_residual,
        first.int8_plane,
        len(schemes),
        weights,
        {use: sum(each[use] for each in bits) / weights for use in bits[0]},
    )


def _bits(scheme: TensorScheme) -> dict[str, int]:
    """Bits that a tensor takes, scales and zero-points included."""
    rows, columns = scheme.shape
    beside_codes = rows * columns // group_length(columns, scheme.group_size) * SCALE_BITS
    plane, eight_bit = (rows * columns * width + beside_codes for width in (4, 8))
    if scheme.role is not Role.LINEAR:
        return {"int4": eight_bit, "int8": eight_bit, "stored": eight_bit}
    return {
        "int4": 2 * plane if scheme.always_residual else plane,
        "int8": 2 * plane,
        "stored": 2 * plane + (eight_bit if scheme.int8_plane else 0),
    }


def _not_quantized(store: StoreManifest, quantized: int) -> SchemeGroup:
    """Norms and biases; they stay in the IR."""
    bits = float(FLOAT_BITS[store.dtype])
    each = {"int4": bits, "int8": bits, "stored": bits}
    return SchemeGroup("norms, biases", None, False, False, False, None, store.parameters - quantized, each)


def _problems(report: Report) -> Iterable[str]:
    if isinstance(report, FileReport):
        return
    for file in report.files:
        if file.bytes is None:
            yield f"{file.name} is missing"
        elif file.whole is False:
            yield f"{file.name} is damaged"
    if isinstance(report, StoreReport):
        for parameters in report.parameter_sets:
            yield from (f"{Path(parameters.path).name}: {problem}" for problem in _problems(parameters))
            if parameters.weights_sha256 != report.manifest.weights_sha256:
                yield f"{Path(parameters.path).name}: made for other weights"


def _print(report: Report) -> None:
    console = Console()
    if isinstance(report, FileReport):
        _print_file(report, console)
    elif isinstance(report, SetReport):
        _print_set(report, console)
    else:
        _print_store(report, console)


def _print_store(report: StoreReport, console: Console) -> None:
    facts = {"path": report.path}
    for field in fields(report.manifest):
        if heading := FACTS.get(field.name, field.name.replace("_", " ")):
            facts[heading] = _words(getattr(report.manifest, field.name))
    console.print(_facts(f"model store {report.manifest.model_id}", facts), _files(report.files), sep="\n")
    for parameters in report.parameter_sets:
        console.print()
        _print_set(parameters, console)


def _print_set(report: SetReport, console: Console) -> None:
    facts = {
        "path": report.path,
        "model": report.model_id,
        "hash": report.hash,
        "made for weights": report.weights_sha256,
        **{key: _words(value) for key, value in report.provenance.items()},
    }
    title = f"parameter set {Path(report.path).resolve().name}"
    console.print(_facts(title, facts), _files(report.files), _schemes(report), sep="\n")


def _print_file(report: FileReport, console: Console) -> None:
    table = _table(("tensor", "dtype", "shape"), ("bytes",), title=report.path)
    for tensor in report.tensors:
        table.add_row(tensor.name, tensor.dtype, _words(list(tensor.shape)), f"{tensor.bytes:,}")
    table.add_section()
    table.add_row(f"{len(report.tensors)} tensors", "", "", f"{sum(tensor.bytes for tensor in report.tensors):,}")
    console.print(table)


def _facts(title: str, facts: Mapping[str, str]) -> Table:
    table = Table("", Column(overflow="fold"), title=title, **TITLE, box=None, show_header=False)
    for key, value in facts.items():
        table.add_row(key, value)
    return table


def _files(files: Iterable[ListedFile]) -> Table:
    table = _table(("file", "SHA-256", "state"), ("bytes",))
    states = {None: "not verified", True: "whole", False: "damaged"}
    for file in files:
        size, state = ("", "missing") if file.bytes is None else (f"{file.bytes:,}", states[file.whole])
        table.add_row(file.name, f"{file.sha256[:DIGITS_SHOWN]}…", state, size)
    return table


def _schemes(report: SetReport) -> Table:
    table = _table(("tensors", "scheme"), ("count", "weights", "INT4", "INT8", "stored"))
    table.caption = "INT4, INT8 (base + residual), stored: bits per weight, with scales and zero-points"
    table.caption_justify = "left"
    for group in report.schemes:
        bits = (f"{group.bits_per_weight[use]:.2f}" for use in USES)
        table.add_row(group.role, _scheme_words(group), str(group.tensors or ""), f"{group.weights:,}", *bits)
    table.add_section()
    table.add_row("all", "", "", f"{report.weights:,}", *(f"{report.bits_per_weight[use]:.2f}" for use in USES))
    return table


def _scheme_words(group: SchemeGroup) -> str:
    if group.group_size is None:
        return "as in the source"
    linear = group.role == Role.LINEAR.value
    words = ["4 + 4 bit" if linear else "8 bit", f"group {group.group_size}" if group.group_size else "per channel"]
    words += ["symmetric"] if group.symmetric else []
    words += ["INT4 uses both"] if group.always_residual else []
    words += ["8-bit plane"] if group.int8_plane else []
    return ", ".join(words)


def _table(left: Iterable[str], right: Iterable[str], title: str | None = None) -> Table:
    table = Table(title=title, **TITLE)
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
