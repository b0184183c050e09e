"""How far the verbs that take a while have come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dskquant.parameter_set import Progress as Report

LINE_EVERY_S = 10.0
"""Where there is no terminal: a log should tell that something happens, and not be filled with it."""


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Report]:
    """Shows what is reported to it on stderr: as a bar if that is a terminal, else as a line now and then."""
    console = Console(file=sys.stderr)
    if quiet or console.is_terminal:
        with _bar(console, disable=quiet) as show:
            yield show
    else:
        yield _lines()


@contextmanager
def _bar(console: Console, disable: bool) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("opening", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield show


def _lines() -> Report:
    """At most one line in LINE_EVERY_S."""
    last = time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LINE_EVERY_S:
            last = now
            print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)

    return show
