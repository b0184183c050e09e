"""The look of all tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import JustifyMethod
from rich.table import Table

from dskctl.words import NOTHING


def table(*columns: str, right: Collection[str] = (), rigid: Collection[str] = ()) -> Table:
    """An empty table in the style all verbs share; the columns in `right` hold numbers.

    When it is too wide for the terminal, columns that are neither in `right` nor in `rigid` are folded.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: JustifyMethod = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column in (*right, *rigid), overflow="fold")
    return made


def dense_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Collection[str] = (),
    rigid: Collection[str] = (),
) -> Table:
    """A table without the columns that have nothing to tell in any row."""
    cells = list(rows)
    told = [index for index in range(len(columns)) if any(row[index] not in ("", NOTHING) for row in cells)]
    made = table(*(columns[index] for index in told), right=right, rigid=rigid)
    for row in cells:
        made.add_row(*(row[index] for index in told))
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """What there is to know of one thing, a line each; without the lines that have nothing to tell."""
    made = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        if value not in ("", NOTHING):
            made.add_row(name, value)
    return made
