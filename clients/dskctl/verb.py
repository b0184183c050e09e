"""What a verb of dskctl is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from dskctl.daemon import Daemon
from dskctl.printer import Printer


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its words in the help text, its arguments, and what it does."""

    name: str
    help: str
    examples: tuple[str, ...]
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Daemon, Printer], None]
    usage: str | None = None
    goes_on: bool = False  # what it begins in the daemon goes on when the client has gone
