"""`dskquant inspect STORE|SET|FILE`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from dskquant.bits import Bits
from dskquant.commands.options import print_modes, spec_words
from dskquant.errors import StoreError
from dskquant.inspection import FileReport, ListedFile, Report, SchemeGroup, SetReport, StoreReport, inspect, problems
from dskquant.plain.inspection import PlainReport, inspect_plain
from dskquant.plain.store import is_plain_store
from dskquant.scheme import Role
from dskquant.store import MANIFEST

DESCRIPTION = """\
Shows what a store, a parameter set or a safetensors file holds: identity and shape, files with their sizes and
SHA-256; of a language model its tensors by scheme, and bits per weight with everything counted (scales, zero-points,
embeddings, and the weights that are not quantized); of a plain graph its modes and their noise. Of a store or a set its
manifest.json may be given too. Nothing is run."""

EXAMPLES = """\
examples:
  dskquant inspect models/smollm2
  dskquant inspect models/smollm2 --verify
  dskquant inspect models/smollm2/parameter_sets/default --json
  dskquant inspect model-00001-of-00002.safetensors

exit status: 0 done, 1 refused, or a file is missing or (--verify) damaged, 2 wrong usage"""

SHOWN_ENTRIES = 6
"""A table or list of more entries, or of tables and lists, is told by its first entries and their number."""

DIGITS_SHOWN = 16
CODES = {"stored": "stored", "derived": "derived from the weights, with these scales and zero-points"}
TITLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
FACTS = {"parameters": "weights", "bos_token_id": "begin token", "end_token_ids": "end tokens", "sha256": ""}
"""Headings of the keys of a store's manifest that need another; an empty one has a table of its own."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="show what a model store, a parameter set or a safetensors file holds",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="STORE|SET|FILE", type=Path)
    parser.add_argument("--verify", action="store_true", help="read every file: its SHA-256, and the rules for scales")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises StoreError for what cannot be read, and, after it is shown, for files that are missing or damaged."""
    store = options.path.parent if options.path.name == MANIFEST else options.path
    if is_plain_store(store):
        _run_plain(store, options)
        return
    report = inspect(options.path, options.verify)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    if found := list(problems(report)):
        raise StoreError(f"{options.path}: {'; '.join(found)}")


def _run_plain(store: Path, options: argparse.Namespace) -> None:
    report = inspect_plain(store, options.verify)
    if options.json:
        print(json.dumps(asdict(report) | {"manifest": report.manifest.as_json()}, indent=2))
    else:
        _print_plain(report)
    if report.problems:
        raise StoreError(f"{store}: {'; '.join(report.problems)}")


def _print_plain(report: PlainReport) -> None:
    manifest = report.manifest
    facts = [
        ("path", report.path),
        ("made from", manifest.source_sha256),
        ("inputs", spec_words(manifest.inputs)),
        ("outputs", spec_words(manifest.outputs)),
        ("batches", "of any number of rows" if manifest.batch_axis == 0 else "one request in each run"),
    ]
    Console(markup=False, emoji=False).print(
        _facts(f"store of the graph {manifest.name}", facts), _files(report.files), sep="\n"
    )
    print_modes(manifest)


def _print(report: Report) -> None:
    console = Console(markup=False, emoji=False)  # what files say is shown as it is
    if isinstance(report, FileReport):
        _print_file(report, console)
    elif isinstance(report, SetReport):
        _print_set(report, console)
    else:
        _print_store(report, console)


def _print_store(report: StoreReport, console: Console) -> None:
    values = {field.name: _words(getattr(report.manifest, field.name)) for field in fields(report.manifest)}
    named = [(FACTS.get(key, key.replace("_", " ")), value) for key, value in values.items()]
    facts = [("path", report.path), *((heading, value) for heading, value in named if heading)]
    console.print(_facts(f"model store {report.manifest.model_id}", facts), _files(report.files), sep="\n")
    for parameters in report.parameter_sets:
        console.print()
        _print_set(parameters, console)


def _print_set(report: SetReport, console: Console) -> None:
    facts = [
        ("path", report.path),
        ("model", report.model_id),
        ("hash", report.hash),
        ("made for weights", report.weights_sha256),
        ("codes", CODES[report.codes]),
        ("expected noise", _noise(report.expected_kl)),
        *((key, _summary(value)) for key, value in report.provenance.items()),
    ]
    title = f"parameter set {Path(report.path).resolve().name}"
    console.print(_facts(title, facts), _files(report.files), _schemes(report), sep="\n")


def _print_file(report: FileReport, console: Console) -> None:
    table = _table(("tensor", "dtype", "shape"), ("bytes",), title=report.path)
    for tensor in report.tensors:
        table.add_row(tensor.name, tensor.dtype, _words(list(tensor.shape)), f"{tensor.bytes:,}")
    table.add_section()
    table.add_row(f"{len(report.tensors)} tensors", "", "", f"{sum(tensor.bytes for tensor in report.tensors):,}")
    console.print(table)


def _noise(expected_kl: Mapping[str, float]) -> str:
    return ", ".join(f"{mode.upper()} {kl:.5f}" for mode, kl in expected_kl.items()) or "not measured"


def _facts(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    table = Table("", Column(overflow="fold"), title=title, **TITLE, box=None, show_header=False)
    for key, value in facts:
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
        bits = _bit_cells(group.bits_per_weight)
        table.add_row(group.role, _scheme_words(group), str(group.tensors or ""), f"{group.weights:,}", *bits)
    table.add_section()
    table.add_row("all", "", "", f"{report.weights:,}", *_bit_cells(report.bits_per_weight))
    return table


def _bit_cells(bits: Bits) -> list[str]:
    return [f"{each:.2f}" for each in (bits.int4, bits.int8, bits.stored)]


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


def _summary(value: Any) -> str:
    """Words for what a set says of its making, however much that is."""
    if not isinstance(value, (dict, list)):
        return _words(value)
    inner = value.values() if isinstance(value, dict) else value
    if len(value) <= SHOWN_ENTRIES and not any(isinstance(item, (dict, list)) for item in inner):
        return _words(value)
    first = ", ".join(map(str, list(value)[:2])) if isinstance(value, dict) else ""
    return f"{len(value)} entries" + (f": {first}, …" if first else "")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
