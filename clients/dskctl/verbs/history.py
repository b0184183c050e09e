"""`dskctl history`"""

from __future__ import annotations

import argparse

from rich.console import RenderableType

from dskapi.v1.control_pb2 import GetHistoryRequest, GetHistoryResponse, HistoryEntry
from dskctl.daemon import Daemon
from dskctl.options import INT32, add_model, integer
from dskctl.printer import Printer
from dskctl.tables import table
from dskctl.verb import Verb
from dskctl.words import NOTHING, local_time, printable, transition

PHASES = ("validate", "build", "prove", "commit")


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--limit", type=integer(*INT32), default=0, metavar="N", help="entries at most, newest first (default: 100)"
    )


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    printer.show(daemon.get_history(GetHistoryRequest(model=args.model, limit=args.limit)), as_text)


def as_text(response: GetHistoryResponse) -> RenderableType:
    """One row for each change, newest first."""
    if not response.entries:
        return "nothing has been changed yet"
    made = table("#", "TIME", "MODEL", "KIND", "CHANGE", "GENERATION", "OUTCOME", "PHASES", "FLIP", "ACTOR", "REASON")
    for entry in response.entries:
        made.add_row(*_row(entry))
    return made


def _row(entry: HistoryEntry) -> list[str]:
    return [
        str(entry.sequence),
        local_time(entry.time),
        entry.model,
        entry.kind,
        transition(entry.from_mode, entry.to_mode),
        str(entry.generation),
        entry.outcome,
        _phases(entry) or NOTHING,
        f"{entry.flip_us:.1f} µs" if entry.flip_us else NOTHING,
        printable(entry.actor),
        printable(entry.reason),
    ]


def _phases(entry: HistoryEntry) -> str:
    """In the order they ran, as far as this client knows them."""
    known = [phase for phase in PHASES if phase in entry.phases_ms]
    others = sorted(entry.phases_ms.keys() - set(PHASES))
    return ", ".join(f"{phase} {entry.phases_ms[phase]:,.1f} ms" for phase in (*known, *others))


VERB = Verb(
    name="history",
    help="show what was changed, by whom, and how it ended",
    examples=("dskctl history", "dskctl history smollm2 --limit 5", "dskctl history --json"),
    configure=configure,
    run=run,
)
