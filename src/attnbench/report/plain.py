"""Rows of named values as a plain table, for listings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from attnbench.printable import shortened


def plain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Columns are the keys of the first row; None and False print as nothing, True as yes."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    headings = list(rows[0]) if rows else []
    for position, heading in enumerate(headings):
        table.add_column(heading, no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*(_text(row[heading]) for heading in headings))
    return table


def _text(value: Any) -> str:
    return "" if value is None or value is False else "yes" if value is True else escape(shortened(str(value)))
