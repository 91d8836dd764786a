"""Where each shape lies on the winner maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

MOST_COLUMNS = 12
MOST_MAPS = 12
"""What is left stands in the table, as a family of one shape does."""
MODELS = "models"
Cell = dict[str, Any]
Combination = tuple[int, str, int]
"""Length as a number and as text, batch: what places are sorted by."""


class WinnerMap(Struct, frozen=True):
    """One map: cells with its number in `map` lie on it."""

    number: int
    title: str
    """The family, where it is of one; else its rows say it."""
    columns: str
    """What its columns are; nothing where there are none."""


def lay_out(cells: Sequence[Cell]) -> list[WinnerMap]:
    """Give every cell that lies on a map its row and column; the largest map first.

    Families that were measured at the same few combinations of batch and length share a map, with a row for each. One
    of many combinations has a map to itself, a row per batch. Shapes of models lie on no grid: a map of rows without
    columns.
    """
    found = sorted(_groups(cells).items(), key=lambda item: -len({cell["workload"] for cell in item[1]}))
    maps = []
    for number, (title, members) in enumerate(found[:MOST_MAPS]):
        grid = [cell for cell in members if not cell.get("model")]
        dense = len(set(map(_combination, grid))) <= MOST_COLUMNS
        alone = len({cell["family"] for cell in grid}) == 1
        _place("row", members, [_row(cell, dense) for cell in members])
        _place("column", grid, [_column(cell, dense) for cell in grid])
        for cell in members:
            cell["map"] = number
        columns = "" if not grid else "Batch x length (tokens)" if dense else "Length (tokens)"
        maps.append(WinnerMap(number, title if alone and not dense else "", columns))
    return maps


def _groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Title -> the cells of a map with two shapes or more."""
    families: dict[str, list[Cell]] = {}
    for cell in cells:
        families.setdefault(MODELS if cell.get("model") else cell["family"], []).append(cell)
    groups: dict[Any, tuple[str, list[Cell]]] = {}
    for title, members in families.items():
        combinations = frozenset(map(_combination, members))
        shared = len(combinations) <= MOST_COLUMNS and title != MODELS
        groups.setdefault(combinations if shared else title, (title, []))[1].extend(members)
    return {title: members for title, members in groups.values() if len(set(map(_combination, members))) > 1}


def _combination(cell: Cell) -> Combination:
    return cell["len"], cell["length"], cell["batch"]


def _place(axis: str, cells: Sequence[Cell], keys: Sequence[tuple[Any, ...]]) -> None:
    places = {one: place for place, one in enumerate(sorted(set(keys)))}
    for cell, one in zip(cells, keys):
        cell |= {axis: one[-1], f"{axis}_place": places[one]}


def _row(cell: Cell, dense: bool) -> tuple[Any, ...]:
    """What rows are sorted by; the title last."""
    if cell.get("model"):
        return (cell["model"], cell["batch"], f"{cell['model']} · {cell['batch']} x {cell['length']}")
    return (cell["family"],) if dense else (cell["batch"], f"batch {cell['batch']}")


def _column(cell: Cell, dense: bool) -> tuple[Any, ...]:
    """What columns are sorted by; the title last."""
    length, text, batch = _combination(cell)
    return (length, text, batch, f"{batch} x {text}") if dense else (length, text, text)
