"""`dskctl watch`"""

from __future__ import annotations

import argparse
from contextlib import closing

from rich.text import Text

from dskapi.v1.control_pb2 import Event, WatchEventsRequest
from dskctl.daemon import Daemon
from dskctl.options import add_model
from dskctl.printer import Printer
from dskctl.verb import Verb
from dskctl.words import local_time, printable


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    with closing(daemon.watch_events(WatchEventsRequest(model=args.model))) as events:
        for event in events:
            printer.show_item(event, as_text)


def as_text(event: Event) -> Text:
    """One line."""
    return Text.assemble(
        (local_time(event.time), "dim"), "  ", (event.kind, "bold"), f"  {event.model}  {printable(event.message)}"
    )


VERB = Verb(
    name="watch",
    help="print events as they happen, until Ctrl-C",
    examples=("dskctl watch", "dskctl watch smollm2 --json"),
    configure=add_model,
    run=run,
)
