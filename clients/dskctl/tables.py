"""The look of all tables."""

from __future__ import annotations

from rich.table import Table


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the style all verbs share; the columns in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column in right)
    return made
