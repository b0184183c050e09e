"""What several verbs share: options, and tables of plain graphs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dskquant.errors import SourceError
from dskquant.modes import LADDER, REFERENCE, PrecisionMode
from dskquant.plain.maker import BLOCK_SIZES, Int8Method
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import TensorSpec
from dskquant.plain.samples import DataOptions
from dskquant.plain.store import PlainManifest

PLAIN_SUFFIXES = (".onnx", ".xml")
NO_DATA = (
    "inputs to calibrate and to measure with are needed: --data INPUTS.npz, or --random-data, whose figures say little"
)
MOST_ROWS = 1 << 20


def is_plain_source(path: Path) -> bool:
    """Whether `path` is a graph that is no model directory or GGUF file, by its name."""
    return path.suffix in PLAIN_SUFFIXES


def add_data_options(group: argparse._ActionsContainer, rows: int) -> list[argparse.Action]:
    defaults = DataOptions(None)
    return [
        group.add_argument(
            "--data", metavar="NPZ", type=Path, help="arrays named as the inputs, a row for each sample"
        ),
        group.add_argument("--random-data", action="store_true", help="random inputs instead: figures that say little"),
        group.add_argument(
            "--random-size",
            metavar="N",
            type=_count,
            default=defaults.open_size,
            help="of the open dimensions of random inputs but the first, which is 1 (default: %(default)s)",
        ),
        group.add_argument(
            "--seed", type=_number, default=defaults.seed, help="of --random-data (default: %(default)s)"
        ),
        group.add_argument("--rows", type=_count, default=rows, help="of the data, at most (default: %(default)s)"),
    ]


def add_int8_options(group: argparse._ActionsContainer) -> list[argparse.Action]:
    return [
        group.add_argument(
            "--int8",
            type=Int8Method,
            choices=list(Int8Method),
            metavar="{" + ",".join(method.value for method in Int8Method) + "}",
            help="activations by ranges found on the data, or by those of each run "
            "(default: dynamic for transformers, static for all others)",
        ),
        group.add_argument(
            "--block-size",
            type=int,
            choices=BLOCK_SIZES,
            default=32,
            help="weights of INT4 that share a scale (default: %(default)s)",
        ),
    ]


def data_options(options: argparse.Namespace) -> DataOptions:
    """Raises SourceError where neither data nor random data was asked for, or both."""
    if (options.data is None) != options.random_data:
        raise SourceError("--data and --random-data exclude each other" if options.random_data else NO_DATA)
    return DataOptions(options.data, options.rows, options.random_size, options.seed)


def kept_layers(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name for names in options.keep_float for name in names.split(",") if name)


def refuse_options(options: argparse.Namespace, actions: Sequence[argparse.Action], what: str) -> None:
    """Raises SourceError for an option that was given and means nothing for `what`."""
    for action in actions:
        if getattr(options, action.dest) != action.default:
            raise SourceError(f"{action.option_strings[0]} is not for {what}")


def modes(text: str) -> tuple[PrecisionMode, ...]:
    """Of words separated by commas, as argparse calls it."""
    try:
        return tuple(PrecisionMode(word) for word in text.split(","))
    except ValueError:
        known = ", ".join(mode.value for mode in LADDER)
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are {known}, separated by commas") from None


def print_modes(manifest: PlainManifest) -> None:
    """The modes of a store with their noise."""
    table = Table("mode", "method", title=f"modes of {manifest.name}", title_justify="left", title_style="bold")
    for heading in ("bytes", "SQNR dB", "cosine", "top-1 same"):
        table.add_column(heading, justify="right")
    for mode in reversed(LADDER):
        if graph := manifest.graphs.get(mode):
            table.add_row(mode.value, graph.method, f"{graph.nbytes:,}", *noise_cells(graph.noise))
    origin = "random inputs, which say little" if manifest.calibration.is_random else manifest.calibration.source
    table.caption = f"noise against {REFERENCE.value.upper()} on {manifest.calibration.rows} rows of {origin}"
    table.caption_justify = "left"
    Console(markup=False, emoji=False).print(table)


def noise_cells(noise: GraphNoise | None) -> list[str]:
    if noise is None:
        return ["", "", ""]
    return [f"{noise.sqnr_db:.1f}", f"{noise.cosine:.5f}", "" if noise.top1 is None else f"{noise.top1:.1%}"]


def spec_words(specs: Sequence[TensorSpec]) -> str:
    return "; ".join(
        f"{spec.name} {spec.dtype.name} [{', '.join('any' if size is None else str(size) for size in spec.shape)}]"
        for spec in specs
    )


def finite(text: str) -> float:
    """A number, as argparse calls it."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MOST_ROWS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST_ROWS}")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
