"""Where each shape lies on the winner map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_COLUMNS = 12


def lay_out(cells: Sequence[dict[str, Any]]) -> None:
    """Give every cell its row and column.

    Few combinations of batch and length make columns of their own, a row per family: no empty map where a sweep varies
    both at once. Many make a row per family and batch, a column per length. A model's shape has a row to itself and no
    column: it lies on no grid.
    """
    grid = [cell for cell in cells if not cell.get("model")]
    dense = len({(cell["length"], cell["batch"]) for cell in grid}) <= MOST_COLUMNS
    for axis, mine, key in (("row", cells, _row), ("column", grid, _column)):
        keys = [key(cell, dense) for cell in mine]
        places = {one: place for place, one in enumerate(sorted(set(keys)))}
        for cell, one in zip(mine, keys):
            cell |= {axis: one[-1], f"{axis}_place": places[one]}


def column_title(cells: Sequence[dict[str, Any]]) -> str:
    """What the columns of the map are."""
    grid = [cell for cell in cells if "column" in cell]
    if not grid:
        return ""
    return "Batch x length (tokens)" if any(cell["column"] != cell["length"] for cell in grid) else "Length (tokens)"


def _row(cell: dict[str, Any], dense: bool) -> tuple[Any, ...]:
    """What rows are sorted by; the title last."""
    if cell.get("model"):
        return (True, cell["model"], cell["batch"], f"{cell['model']} · {cell['batch']} x {cell['length']}")
    return (
        (False, cell["family"], 0, cell["family"]) if dense else (False, cell["family"], cell["batch"], cell["track"])
    )


def _column(cell: dict[str, Any], dense: bool) -> tuple[Any, ...]:
    """What columns are sorted by; the title last."""
    if dense:
        return (cell["len"], cell["length"], cell["batch"], f"{cell['batch']} x {cell['length']}")
    return (cell["len"], cell["length"], 0, cell["length"])
