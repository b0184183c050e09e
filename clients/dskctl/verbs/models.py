"""`dskctl models`"""

from __future__ import annotations

import argparse

from rich.console import RenderableType

from dskapi.v1.control_pb2 import ListModelsRequest, ListModelsResponse
from dskctl.daemon import Daemon
from dskctl.printer import Printer
from dskctl.tables import table
from dskctl.verb import Verb
from dskctl.words import NOTHING, count_words, mode_word, state_word


def configure(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    printer.show(daemon.list_models(ListModelsRequest()), as_text)


def as_text(response: ListModelsResponse) -> RenderableType:
    """One row for each model the daemon knows."""
    if not response.models:
        return "no models are configured"
    numbers = ("PARAMETERS", "CONTEXT")
    made = table("MODEL", "STATE", "MODE", "RESIDENT", *numbers, "ARCHITECTURE", "PATH", right=numbers)
    for model in response.models:
        made.add_row(
            model.name,
            state_word(model.state),
            mode_word(model.mode),
            ", ".join(mode_word(mode) for mode in model.resident) or NOTHING,
            count_words(model.parameters) if model.parameters else NOTHING,
            f"{model.context_length:,}" if model.context_length else NOTHING,
            model.architecture or NOTHING,
            model.path,
        )
    return made


VERB = Verb(
    name="models",
    help="list the models the daemon knows, loaded or not",
    examples=("dskctl models", "dskctl models --json"),
    configure=configure,
    run=run,
)
