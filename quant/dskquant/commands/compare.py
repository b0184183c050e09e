"""`dskquant compare STORE [SET ...] --data TEXT`"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from dskquant import parameter_set
from dskquant.commands.options import modes
from dskquant.commands.progress import progress_bar
from dskquant.comparison import ModeQuality, NamedSet, compare_modes, encode_text
from dskquant.engines import ENGINE_NAMES, load_engine
from dskquant.engines.protocol import CompileOptions
from dskquant.errors import SourceError
from dskquant.modes import LADDER
from dskquant.parameter_set import Codes, ParameterSet, Progress
from dskquant.set_writer import complete
from dskquant.store import StoreManifest
from dskquant.validation import validate

DESCRIPTION = """\
Measures the precision modes of a model store against its reference, FP32, on a text: perplexity, Kullback-Leibler
divergence KL(FP32 || mode) in nats per token (mean and 99th percentile), and how often the most probable token is the
same. The text is cut into windows that each start afresh. INT4 and INT8 are those of the store's default parameter set
and of each SET, a directory with a manifest.json; where a SET has scales and zero-points alone, its codes are derived
first. Needs the memory of the FP32 graph and of the graphs of all sets."""

EXAMPLES = """\
examples:
  dskquant compare models/smollm2 --data prose.txt
  dskquant compare models/smollm2 --data prose.txt --modes int4,int8 --activation-group 0 --tokens 4096
  dskquant compare models/smollm2 sets/november sets/december --data prose.txt --modes int4
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
    parser.add_argument("sets", metavar="SET", type=Path, nargs="*", help="parameter sets beside the default one")
    parser.add_argument("--data", metavar="TEXT", type=Path, required=True, help="a text file, UTF-8")
    parser.add_argument("--tokens", type=_positive, default=2048, help="of the text, at most (default: %(default)s)")
    parser.add_argument("--window", type=_positive, default=512, help="tokens of context (default: %(default)s)")
    parser.add_argument("--modes", type=modes, default=LADDER, help="comma-separated (default: all)")
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
    """Raises QuantError or OSError when the store, a set or the text cannot be used."""
    StoreManifest.read(options.store)  # what is no store is refused before anything else is looked at
    tokens = encode_text(options.store, _text(options.data), options.tokens)
    with TemporaryDirectory(prefix="dskquant-compare-") as scratch, progress_bar(options.quiet) as show:
        qualities = compare_modes(
            options.store,
            load_engine(options.engine),
            tokens,
            options.modes,
            CompileOptions(kv_precision=options.kv_precision, activation_group=options.activation_group),
            sets=[
                NamedSet(str(path), _whole(path, options.store, Path(scratch) / str(number), show))
                for number, path in enumerate(options.sets)
            ],
            window=options.window,
            progress=lambda done, total: show("comparing windows", done, total),
        )
    if options.json:
        print(json.dumps([asdict(quality) | {"mode": quality.mode.value} for quality in qualities], indent=2))
    else:
        Console(markup=False, emoji=False).print(_table(qualities))


def _whole(path: Path, store: Path, scratch: Path, progress: Progress) -> ParameterSet:
    """The set at `path`, proven to fit `store`; with its codes in `scratch` where they have to be derived."""
    parameters = parameter_set.read(path)
    if parameters.codes is Codes.DERIVED:
        return complete(parameters, store, scratch, progress)
    validate(parameters, store)
    return parameters


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _table(qualities: list[ModeQuality]) -> Table:
    title, caption = f"{qualities[0].positions} positions, against FP32", "bits: per weight, with everything counted"
    table = Table(title=title, caption=caption)
    table.add_column("set", overflow="fold")
    table.add_column("mode")
    for heading in ("bits", "perplexity", "mean KL", "p99 KL", "top-1 same"):
        table.add_column(heading, justify="right")
    for quality in qualities:
        table.add_row(
            quality.parameter_set or "",
            quality.mode.value,
            f"{quality.bits_per_weight:.2f}",
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
