"""`dskctl history`"""

from __future__ import annotations

import argparse

from rich.console import Group, RenderableType
from rich.table import Table

from dskapi.v1.control_pb2 import GetHistoryRequest, GetHistoryResponse, HistoryEntry
from dskctl.daemon import Daemon
from dskctl.options import INT32, add_model, integer
from dskctl.printer import Printer
from dskctl.tables import dense_table, facts
from dskctl.verb import Verb
from dskctl.words import (
    NOTHING,
    duration_words,
    flip_words,
    generation_word,
    in_flight_word,
    kl_words,
    local_time,
    mode_word,
    moved,
    phase_words,
    printable,
    proof_facts,
    short_hash,
    short_time,
    transition,
)

COLUMNS = ("#", "TIME", "MODEL", "KIND", "GEN", "MODE", "HASH", "KL", "TOOK", "OUTCOME", "BY")
NUMBERS = ("#", "TOOK")
RIGID = COLUMNS[:-1]
NOTHING_YET = "nothing has been changed yet"


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--limit", type=integer(*INT32), default=0, metavar="N", help="entries at most, newest first (default: 100)"
    )
    parser.add_argument("--full", action="store_true", help="all there is to know of each change, a line each")


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    response = daemon.get_history(GetHistoryRequest(model=args.model, limit=args.limit))
    printer.show(response, in_full if args.full else as_text)


def as_text(response: GetHistoryResponse) -> RenderableType:
    """One row for each change, newest first; below them the reasons of what was rejected, and of the monitor."""
    if not response.entries:
        return NOTHING_YET
    made = dense_table(COLUMNS, map(_row, response.entries), right=NUMBERS, rigid=RIGID)
    reasons = [f"#{entry.sequence}: {printable(entry.reason)}" for entry in response.entries if entry.reason]
    return Group(made, "", *reasons) if reasons else made


def _row(entry: HistoryEntry) -> list[str]:
    return [
        str(entry.sequence),
        short_time(entry.time),
        entry.model,
        entry.kind,
        _generations(entry),
        _modes(entry),
        short_hash(entry.hash, digits=8),
        next((kl_words(proof) for proof in entry.proofs if proof.mode == entry.to_mode), NOTHING),
        duration_words(sum(entry.phases_ms.values())) if entry.phases_ms else NOTHING,
        entry.outcome,
        printable(entry.actor),
    ]


def in_full(response: GetHistoryResponse) -> RenderableType:
    """A block of lines for each change, newest first."""
    blocks = [part for entry in response.entries for part in (_block(entry), "")]
    return Group(*blocks[:-1]) if blocks else NOTHING_YET


def _block(entry: HistoryEntry) -> Table:
    return facts(
        [
            (f"#{entry.sequence}", local_time(entry.time)),
            ("model", entry.model),
            ("kind", entry.kind),
            ("by", printable(entry.actor)),
            ("outcome", entry.outcome),
            ("reason", printable(entry.reason)),
            ("generation", _generations(entry)),
            ("hash", entry.hash),
            ("parameter set", entry.parameter_set),
            ("mode", _modes(entry)),
            ("in flight", in_flight_word(entry.in_flight)),
            *proof_facts(entry.proofs),
            ("phases", phase_words(entry.phases_ms)),
            ("flip", flip_words(entry.flip_us)),
        ]
    )


def _generations(entry: HistoryEntry) -> str:
    return moved(generation_word(entry.from_generation), generation_word(entry.generation))


def _modes(entry: HistoryEntry) -> str:
    """A load or unload has one end only."""
    if entry.from_mode == entry.to_mode:
        return mode_word(entry.to_mode)
    return transition(entry.from_mode, entry.to_mode)


VERB = Verb(
    name="history",
    help="show what was changed, by whom, and how it ended",
    examples=("dskctl history", "dskctl history smollm2 --limit 5", "dskctl history --full", "dskctl history --json"),
    configure=configure,
    run=run,
)
