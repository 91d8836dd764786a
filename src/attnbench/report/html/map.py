"""Where each shape lies on the winner map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_COLUMNS = 12
OWN = "as in the model"
"""The column of shapes that go by the name of a model: they lie on no grid."""
LAST = float("inf")


def lay_out(cells: Sequence[dict[str, Any]]) -> None:
    """Give every cell its row and column.

    Few combinations of batch and length make columns of their own, a row per family: no empty map where a sweep varies
    both at once. Many make a row per family and batch, a column per length. A model's shape has a row to itself.
    """
    pairs = {(cell["length"], cell["batch"]) for cell in cells if not cell.get("model")}
    dense = len(pairs) <= MOST_COLUMNS
    for axis, key in (("row", _row), ("column", _column)):
        keys = [key(cell, dense) for cell in cells]
        places = {one: place for place, one in enumerate(sorted(set(keys)))}
        for cell, mine in zip(cells, keys):
            cell |= {axis: mine[-1], f"{axis}_place": places[mine]}


def _row(cell: dict[str, Any], dense: bool) -> tuple[Any, ...]:
    """What rows are sorted by; the title last."""
    if cell.get("model"):
        return (True, cell["model"], cell["batch"], f"{cell['model']} · {cell['batch']} x {cell['length']}")
    return (
        (False, cell["family"], 0, cell["family"]) if dense else (False, cell["family"], cell["batch"], cell["track"])
    )


def _column(cell: dict[str, Any], dense: bool) -> tuple[Any, ...]:
    """What columns are sorted by; the title last."""
    if cell.get("model"):
        return (LAST, "", 0, OWN)
    if dense:
        return (cell["len"], cell["length"], cell["batch"], f"{cell['batch']} x {cell['length']}")
    return (cell["len"], cell["length"], 0, cell["length"])
