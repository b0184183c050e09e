"""`dskquant calibrate STORE --data TEXT -o SET`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dskquant.bits import mean_bits
from dskquant.calibration.calibrate import Calibration, CalibrationOptions, calibrate
from dskquant.calibration.layers import Method
from dskquant.calibration.selection import Sensitivity
from dskquant.commands.progress import progress_bar
from dskquant.engines import ENGINE_NAMES, load_engine
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import Codes
from dskquant.scheme import GROUP_SIZES, Scheme
from dskquant.store import StoreManifest

DESCRIPTION = """\
Makes a parameter set that computes closer to the model than rounding to nearest does, with the help of a text like
those that the model will read. FP32 runs on the text to see what each linear layer is fed with; ranges are searched
so that the error of its output becomes small. The last part of the text is not calibrated on: it measures the result,
and the divergence found goes into the set.

With --budget or --max-kl the layers are measured one by one, and those where it is worth most get the residual plane
in INT4 too. Needs the memory of the FP32 graph. SET appears complete or not at all."""

EXAMPLES = """\
examples:
  dskquant calibrate models/smollm2 --data prose.txt -o sets/better
  dskquant calibrate models/smollm2 --data prose.txt -o sets/mixed --budget 6.3
  dskquant calibrate models/smollm2 --data prose.txt -o sets/exact --max-kl 0.05 --group-size 32
  dskquant calibrate models/smollm2 --data prose.txt -o sets/small --method search --scales-only"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "calibrate",
        help="make a parameter set that suits a text better than rounding to nearest",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = CalibrationOptions()
    parser.add_argument("store", metavar="STORE", type=Path)
    parser.add_argument("--data", metavar="TEXT", type=Path, required=True, help="a text file, UTF-8")
    parser.add_argument("-o", "--output", metavar="SET", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--method",
        type=Method,
        choices=list(Method),
        default=defaults.method,
        metavar="{" + ",".join(method.value for method in Method) + "}",
        help=f"gptq: search and error feedback; search: codes by rounding (default: {defaults.method.value})",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=defaults.scheme.group_size,
        help="weights that share a scale, 0: a whole channel (default: %(default)s)",
    )
    parser.add_argument("--symmetric", action="store_true", help="quantize without zero-points")
    parser.add_argument(
        "--tokens", type=_count, default=defaults.tokens, help="to calibrate on, at most (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_count, default=defaults.seed, help="chooses them (default: %(default)s)")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--budget", metavar="BITS", type=_positive, help="of INT4 per weight, everything counted")
    goal.add_argument("--max-kl", metavar="NATS", type=_positive, help="of INT4 per token, on the held-out text")
    parser.add_argument("--int8-plane", action="store_true", help="add a plane of 8-bit codes, as `convert` does")
    parser.add_argument("--scales-only", action="store_true", help="leave the codes to be derived by rounding")
    parser.add_argument("--engine", choices=ENGINE_NAMES, default=ENGINE_NAMES[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises QuantError or OSError when the set cannot be made."""
    settings = CalibrationOptions(
        method=options.method,
        scheme=Scheme(options.group_size, options.symmetric, int8_plane=options.int8_plane),
        tokens=options.tokens,
        seed=options.seed,
        budget=options.budget,
        max_kl=options.max_kl,
        codes=Codes.DERIVED if options.scales_only else Codes.STORED,
    )
    manifest = StoreManifest.read(options.store)
    engine = load_engine(options.engine)
    with progress_bar(options.quiet) as progress:
        made = calibrate(options.store, options.data, options.output, settings, engine, progress)
    if options.json:
        print(json.dumps(_report(options.output, made, manifest), indent=2))
    elif not options.quiet:
        _print(options.output, made, manifest)


def _report(output: Path, made: Calibration, manifest: StoreManifest) -> dict[str, Any]:
    parameters = made.parameters
    return {
        "set": str(output),
        "hash": parameters.hash,
        "bits_per_weight": mean_bits(parameters.tensors.values(), manifest).int4,
        "expected_kl": {mode.value: kl for mode, kl in parameters.expected_kl.items()},
        "sensitivities": [
            {
                "layers": item.unit,
                "kl": item.kl,
                "bits": item.bits,
                "always_residual": parameters.tensors[item.unit[0]].always_residual,
            }
            for item in made.sensitivities
        ],
        "provenance": {key: value for key, value in parameters.provenance.items() if key != "sensitivities"},
    }


def _print(output: Path, made: Calibration, manifest: StoreManifest) -> None:
    parameters = made.parameters
    if made.sensitivities:
        Console().print(_table(made))
    bits = mean_bits(parameters.tensors.values(), manifest).int4
    kl = {mode: parameters.expected_kl[mode] for mode in (PrecisionMode.INT4, PrecisionMode.INT8)}
    print(
        f"{output}: {bits:.2f} bits per weight in INT4; on held-out text, against FP32: "
        + ", ".join(f"{mode.value} {value:.5f} nats per token" for mode, value in kl.items())
    )


def _table(made: Calibration) -> Table:
    table = Table(title="what the residual plane of each layer is worth", title_justify="left")
    for heading in ("layers", "INT4", "KL", "KL per Mbit"):
        table.add_column(heading, justify="right" if "KL" in heading else "left")
    for item in made.sensitivities:
        precision = "both planes" if made.parameters.tensors[item.unit[0]].always_residual else "base"
        table.add_row(_words(item), precision, f"{item.kl:.5f}", f"{item.worth * 1e6:.5f}")
    return table


def _words(item: Sensitivity) -> str:
    """model.layers.0.self_attn.q_proj.weight and so on as "model.layers.0.self_attn.q_proj, k_proj, v_proj"."""
    names: Sequence[str] = [name.removesuffix(".weight") for name in item.unit]
    return ", ".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
