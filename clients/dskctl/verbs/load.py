"""`dskctl load`"""

from __future__ import annotations

import argparse

from dskapi.v1.control_pb2 import LoadModelRequest, LoadModelResponse
from dskctl.daemon import Daemon
from dskctl.options import utf8
from dskctl.printer import Printer
from dskctl.verb import Verb
from dskctl.words import mode_word, state_word


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=utf8, help="a model of the configuration, or a new name")
    parser.add_argument(
        "--path",
        metavar="DIR",
        default="",
        type=utf8,
        help="a model store on the daemon's machine, for a new name (the daemon must allow it)",
    )


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    printer.show(daemon.load_model(LoadModelRequest(model=args.model, path=args.path)), as_text)


def as_text(response: LoadModelResponse) -> str:
    model = response.model
    return (
        f"{model.name}: {state_word(model.state)} in {mode_word(model.mode)}, "
        f"generation {model.generation}, loaded in {response.load_ms:,.0f} ms"
    )


VERB = Verb(
    name="load",
    help="load a model",
    examples=("dskctl load smollm2", "dskctl load other --path /srv/models/other"),
    configure=configure,
    run=run,
    goes_on=True,
)
