"""`dskctl unload`"""

from __future__ import annotations

import argparse

from dskapi.v1.control_pb2 import UnloadModelRequest, UnloadModelResponse
from dskctl.daemon import Daemon
from dskctl.options import utf8
from dskctl.printer import Printer
from dskctl.verb import Verb


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=utf8, help="a loaded model")


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    printer.show(daemon.unload_model(UnloadModelRequest(model=args.model)), as_text)


def as_text(response: UnloadModelResponse) -> str:
    aborted = f", {response.aborted_requests} requests aborted" if response.aborted_requests else ""
    return f"{response.model}: unloaded in {response.unload_ms:,.0f} ms{aborted}"


VERB = Verb(
    name="unload",
    help="unload a model when its open requests have finished",
    examples=("dskctl unload smollm2",),
    configure=configure,
    run=run,
    goes_on=True,
)
