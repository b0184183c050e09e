"""`dskctl switch`"""

from __future__ import annotations

import argparse

from dskapi.v1.control_pb2 import SwitchPrecisionRequest, SwitchPrecisionResponse
from dskctl.daemon import Daemon
from dskctl.options import add_in_flight, add_mode, add_only_model, add_wait
from dskctl.printer import Printer
from dskctl.verb import Verb
from dskctl.words import IN_FLIGHT, MODES, transition


def configure(parser: argparse.ArgumentParser) -> None:
    add_only_model(parser)
    add_mode(parser)
    add_in_flight(parser)
    add_wait(parser)
    parser.add_argument(
        "--pin", action="store_true", help="keep the mode whatever the noise monitor says, until the next switch"
    )


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    request = SwitchPrecisionRequest(
        model=args.model,
        mode=MODES[args.mode],
        in_flight=IN_FLIGHT[args.in_flight],
        wait=args.wait,
        pin=args.pin,
    )
    printer.show(daemon.switch_precision(request), as_text)


def as_text(response: SwitchPrecisionResponse) -> str:
    """From, to, and what the change took."""
    change = f"{response.model}: {transition(response.from_mode, response.to_mode)}"
    if not response.done:
        return f"{change}, being prepared in the background; `dskctl watch` tells when it serves"
    preparation = "resident" if response.resident else f"prepared in {response.prepare_ms:,.0f} ms"
    return f"{change}, generation {response.generation}, {preparation}, flip {response.flip_us:.1f} µs"


VERB = Verb(
    name="switch",
    help="change the precision mode a model serves in",
    examples=(
        "dskctl switch int8",
        "dskctl switch smollm2 fp32 --no-wait",
        "dskctl switch smollm2 int4 --in-flight finish",
        "dskctl switch int8 --pin",
    ),
    configure=configure,
    run=run,
    goes_on=True,
)
