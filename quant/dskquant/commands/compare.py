"""`dskquant compare STORE --data TEXT`"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dskquant.comparison import ModeQuality, compare_modes, encode_text
from dskquant.engines import ENGINE_NAMES, load_engine
from dskquant.engines.protocol import CompileOptions
from dskquant.errors import SourceError
from dskquant.modes import LADDER, PrecisionMode
from dskquant.store import StoreManifest

DESCRIPTION = """\
Measures the precision modes of a model store against its reference, FP32, on a text: perplexity, Kullback-Leibler
divergence KL(FP32 || mode) in nats per token (mean and 99th percentile), and how often the most probable token is the
same. The text is cut into windows that each start afresh. Needs the memory of the FP32 graph."""

EXAMPLES = """\
examples:
  dskquant compare models/smollm2 --data prose.txt
  dskquant compare models/smollm2 --data prose.txt --modes int4,int8 --activation-group 0 --tokens 4096
  dskquant compare models/smollm2 --data prose.txt --json"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "compare",
        help="measure the noise of each precision mode on a text",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", metavar="STORE", type=Path)
    parser.add_argument("--data", metavar="TEXT", type=Path, required=True, help="a text file, UTF-8")
    parser.add_argument("--tokens", type=_positive, default=2048, help="of the text, at most (default: %(default)s)")
    parser.add_argument("--window", type=_positive, default=512, help="tokens of context (default: %(default)s)")
    parser.add_argument("--modes", type=_modes, default=LADDER, help="comma-separated (default: all)")
    parser.add_argument(
        "--activation-group",
        type=int,
        default=CompileOptions().activation_group,
        help="INT4, INT8: dynamic 8-bit activations per this many inputs, 0: float activations (default: %(default)s)",
    )
    parser.add_argument("--kv-precision", default=CompileOptions().kv_precision, choices=("u8", "f16", "bf16", "f32"))
    parser.add_argument("--engine", choices=ENGINE_NAMES, default=ENGINE_NAMES[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises QuantError or OSError when the store or the text cannot be used."""
    StoreManifest.read(options.store)  # what is no store is refused before anything else is looked at
    tokens = encode_text(options.store, _text(options.data), options.tokens)
    columns = (TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=options.quiet) as bar:
        task = bar.add_task("windows", total=None)
        qualities = compare_modes(
            options.store,
            load_engine(options.engine),
            tokens,
            options.modes,
            CompileOptions(kv_precision=options.kv_precision, activation_group=options.activation_group),
            window=options.window,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if options.json:
        print(json.dumps([asdict(quality) | {"mode": quality.mode.value} for quality in qualities], indent=2))
    else:
        Console().print(_table(qualities))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _table(qualities: list[ModeQuality]) -> Table:
    table = Table(title=f"{qualities[0].positions} positions, against FP32")
    for heading in ("mode", "perplexity", "mean KL", "p99 KL", "top-1 same"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for quality in qualities:
        table.add_row(
            quality.mode.value,
            f"{quality.perplexity:.2f}",
            f"{quality.mean_kl:.5f}",
            f"{quality.p99_kl:.4f}",
            f"{quality.agreement:.1%}",
        )
    return table


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 2")
    return int(text)


def _modes(text: str) -> tuple[PrecisionMode, ...]:
    try:
        return tuple(PrecisionMode(word) for word in text.split(","))
    except ValueError:
        known = ", ".join(mode.value for mode in LADDER)
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are {known}, separated by commas") from None
