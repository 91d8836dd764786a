"""Where each shape lies on the winner map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_COLUMNS = 12


def lay_out(cells: Sequence[dict[str, Any]]) -> None:
    """Give every cell its row and column.

    Few combinations of batch and length make columns of their own, a row per family: no empty map where a sweep varies
    both at once. Many make a row per family and batch, a column per length.
    """
    pairs = sorted({(cell["len"], cell["length"], cell["batch"]) for cell in cells})
    dense = len(pairs) <= MOST_COLUMNS
    rows = sorted({_row(cell, dense) for cell in cells})
    columns = sorted({_column(cell, dense) for cell in cells})
    row_places = {row: place for place, row in enumerate(rows)}
    column_places = {column: place for place, column in enumerate(columns)}
    for cell in cells:
        row, column = _row(cell, dense), _column(cell, dense)
        cell |= {"row": cell["family"] if dense else cell["track"], "row_place": row_places[row]}
        cell |= {"column": _title(cell, dense), "column_place": column_places[column]}


def _row(cell: dict[str, Any], dense: bool) -> tuple[str, int]:
    return (cell["family"], 0 if dense else cell["batch"])


def _column(cell: dict[str, Any], dense: bool) -> tuple[int, str, int]:
    return (cell["len"], cell["length"], cell["batch"] if dense else 0)


def _title(cell: dict[str, Any], dense: bool) -> str:
    return f"{cell['batch']} x {cell['length']}" if dense else cell["length"]
