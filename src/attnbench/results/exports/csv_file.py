"""The table as CSV, for spreadsheets. Lists of samples have no place in a cell and are left out."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from attnbench.printable import printable
from attnbench.results.exports.table import COLUMNS, Source, rows

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Text that begins like this is run by spreadsheets; an apostrophe before it makes it text again."""
SHOWN = [name for name, kind in COLUMNS.items() if kind not in ("reals", "integers")]


def csv_text(sources: Sequence[Source]) -> str:
    """A heading and a line per record; what was not measured is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(SHOWN)
    for row in rows(sources):
        writer.writerow([_cell(row[name]) for name in SHOWN])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Text on one visible line: it may be printed, and spreadsheets run what looks like a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{printable(value)}" if value.lstrip(" ").startswith(FORMULA) else printable(value)
    return value
