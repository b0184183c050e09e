"""`dskquant recommend GRAPH|STORE`"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dskquant.commands.options import (
    add_data_options,
    add_int8_options,
    data_options,
    finite,
    is_plain_source,
    noise_cells,
)
from dskquant.commands.progress import progress_bar
from dskquant.errors import SourceError
from dskquant.plain.advice import WANTED_SQNR_DB
from dskquant.plain.recommend import Recommendation, RecommendOptions, recommend
from dskquant.plain.store import is_plain_store

DESCRIPTION = """\
Says what to quantize of a plain graph, and how: counts its operators, measures the noise and the speed of every mode
on every engine that can run it, quantizes one group of layers at a time to see which of them make the noise of INT8,
and, where INT8 as a whole is too noisy, looks for the layers to leave in float. Of a store the modes are taken as they
are, and measured on its golden inputs unless --data is given. Nothing is written."""

EXAMPLES = """\
examples:
  dskquant recommend detector.onnx --data inputs.npz
  dskquant recommend detector.onnx --data inputs.npz --min-sqnr 25 --json
  dskquant recommend models/detector

exit status: 0 done, 1 refused (one line on stderr says why), 2 wrong usage"""

ROWS = 16
OPERATORS_SHOWN = 8


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "recommend",
        help="say what to quantize of a plain graph, and how",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="GRAPH|STORE", type=Path, help="an ONNX file, an IR's .xml, or a store")
    add_data_options(parser, ROWS)
    add_int8_options(parser)
    parser.add_argument(
        "--min-sqnr",
        metavar="DB",
        type=finite,
        default=WANTED_SQNR_DB,
        help="signal above noise that is wanted of a mode (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises QuantError or OSError when the graph, the store or the data cannot be used."""
    if not is_plain_source(options.source) and not is_plain_store(options.source):
        raise SourceError(
            f"{options.source}: neither an ONNX file, nor the .xml of an IR, nor the store of such a graph"
        )
    from_golden = is_plain_store(options.source) and options.data is None and not options.random_data
    settings = RecommendOptions(
        None if from_golden else data_options(options), options.int8, options.block_size, options.min_sqnr
    )
    with progress_bar(options.quiet) as progress:
        found = recommend(options.source, settings, progress)
    if options.json:
        print(json.dumps(_report(found), indent=2))
    else:
        _print(found)


def _report(found: Recommendation) -> dict[str, Any]:
    best = found.advice.best
    return {
        "source": found.source,
        "kind": found.kind.value,
        "operators": dict(found.operators),
        "layers": found.layers,
        "data": found.data,
        "rows": found.rows,
        "modes": [asdict(each) | {"mode": each.mode.value} for each in found.figures],
        "sensitivity": [asdict(group) for group in found.groups],
        "keep_float": list(found.keep_float),
        "serve": {"mode": best.name, "engine": best.engine},
        "reasons": list(found.advice.reasons),
        "notes": list(found.notes),
    }


def _print(found: Recommendation) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in list(found.operators.items())[:OPERATORS_SHOWN])
    print(f"{found.source}: {found.kind.value}, {found.layers} layers with weights; {counts}")
    Console(markup=False, emoji=False).print(_modes(found), *([_groups(found)] if found.groups else []), sep="\n")
    for reason in found.advice.reasons:
        print(f"- {reason}")  # unwrapped: there are commands in it
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)


def _modes(found: Recommendation) -> Table:
    table = Table("mode", "engine", title="modes", title_justify="left", title_style="bold")
    for heading in ("bytes", "SQNR dB", "cosine", "top-1 same", "ms a run"):
        table.add_column(heading, justify="right")
    for each in found.figures:
        table.add_row(each.name, each.engine, f"{each.nbytes:,}", *noise_cells(each.noise), f"{each.ms:.2f}")
    table.caption, table.caption_justify = f"on {found.rows} rows of {found.data}; median of interleaved runs", "left"
    return table


def _groups(found: Recommendation) -> Table:
    title = "noise of INT8 in one group of layers alone"
    table = Table("layers", title=title, title_justify="left", title_style="bold")
    for heading in ("count", "weights", "SQNR dB", "left in float"):
        table.add_column(heading, justify="right")
    for group in found.groups:
        kept = "yes" if set(group.layers) <= set(found.keep_float) else ""
        span = group.layers[0] if len(group.layers) == 1 else f"{group.layers[0]} … {group.layers[-1]}"
        table.add_row(span, str(len(group.layers)), f"{group.weights:,}", f"{group.sqnr_db:.1f}", kept)
    return table
