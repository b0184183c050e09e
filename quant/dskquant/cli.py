"""`dskquant`: offline tools around model stores. One module of `dskquant.commands` for each verb."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dskquant.commands import calibrate, compare, convert, inspect, recommend
from dskquant.errors import QuantError
from dskquant.version import VERSION

VERBS = (convert, calibrate, compare, inspect, recommend)
DONE, REFUSED, INTERRUPTED = 0, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns 0 when done, 1 when refused (one line on stderr), 130 when interrupted by Ctrl-C or
    SIGTERM; argparse exits with 2 on wrong usage.
    """
    options = build_parser().parse_args(arguments)
    try:
        with _sigterm_as_ctrl_c():
            options.run(options)
    except (QuantError, OSError) as error:
        print(f"dskquant {options.verb}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"dskquant {options.verb}: interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    return DONE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="dskquant", description="Convert, quantize and compare models, offline.")
    parser.add_argument("--version", action="version", version=f"dskquant {VERSION}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_parser(verbs)
    return parser


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM unwinds the work as Ctrl-C does, so that what is half written is removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
