"""`dskctl rollback`"""

from __future__ import annotations

import argparse
from functools import partial

from dskapi.v1.control_pb2 import RollbackRequest
from dskctl import change
from dskctl.daemon import Daemon
from dskctl.options import UINT64, add_in_flight, add_only_model, add_wait, integer
from dskctl.printer import Printer
from dskctl.verb import Verb
from dskctl.words import IN_FLIGHT

FIRST_GENERATION = 1
PREVIOUS = 0
"""The protocol's word for the generation before the present one."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_only_model(parser)
    parser.add_argument(
        "--to",
        type=integer(FIRST_GENERATION, UINT64[1]),
        default=PREVIOUS,
        metavar="N",
        help="a generation that `dskctl status` lists (default: the one that served before)",
    )
    add_in_flight(parser)
    add_wait(parser)


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    request = RollbackRequest(model=args.model, generation=args.to, in_flight=IN_FLIGHT[args.in_flight], wait=args.wait)
    response = change.awaited(partial(daemon.rollback, request), "rolling back", daemon, printer)
    printer.show(response, change.as_text)


VERB = Verb(
    name="rollback",
    help="return to an earlier generation of a model",
    examples=("dskctl rollback", "dskctl rollback smollm2 --to 3", "dskctl rollback --in-flight finish"),
    configure=configure,
    run=run,
    goes_on=True,
)
