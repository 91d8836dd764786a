"""Where each shape lies on the winner maps, and who wins it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def winner_rows(cells: Iterable[Cell]) -> list[Cell]:
    """Return a row for each shape: the cell with the first place, the other names of its kernel, and the next kernel.

    Places, ties and kernels come from the standings; the page does the same with what passes its filters.
    """
    shapes: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.get("place") is not None:
            shapes.setdefault(cell["workload"], []).append(cell)
    rows: list[Cell] = []
    for members in shapes.values():
        first, *others = sorted(members, key=lambda cell: cell["place"])
        same = [cell["label"] for cell in others if cell["kernel"] == first["kernel"]]
        left = [cell for cell in others if cell["kernel"] != first["kernel"]]
        second = next((cell for cell in left if cell["group"] == first["group"]), None)
        tie = "within" if all(cell["framework"] == first["framework"] for cell in others) else "tie"
        close = any(cell[tie] == first[tie] for cell in left)
        rows.append(first | {
            "same": ", ".join(same) or None,
            "next_label": None if second is None else second["label"],
            "regret": None if second is None else max(0.0, second["ns"] / first["ns"] - 1),
            "close": close,
            "certain": "no, too close to call" if close else "only one measured" if second is None else "yes",
            "field": len(members),
        })  # fmt: skip
    return rows


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
    """Return title -> the cells of a map with two shapes or more.

    A family whose combinations all lie on the map of another family is a row of that map: an interrupted run leaves
    some families with fewer shapes than others, and one map must still show all of them.
    """
    families: dict[str, list[Cell]] = {}
    for cell in cells:
        families.setdefault(MODELS if cell.get("model") else cell["family"], []).append(cell)
    groups: list[tuple[str, frozenset[Combination], list[Cell]]] = []
    combinations = {title: frozenset(map(_combination, members)) for title, members in families.items()}
    for title in sorted(families, key=lambda name: -len(combinations[name])):
        mine = combinations[title] if title != MODELS and len(combinations[title]) <= MOST_COLUMNS else frozenset()
        host = next((members for _, wider, members in groups if mine and mine <= wider), None)
        if host is None:
            groups.append((title, mine, list(families[title])))
        else:
            host.extend(families[title])
    return {title: members for title, _, members in groups if len(set(map(_combination, members))) > 1}


def _combination(cell: Cell) -> Combination:
    return cell["len"], cell["length"], cell["batch"]


def _place(axis: str, cells: Sequence[Cell], keys: Sequence[tuple[Any, ...]]) -> None:
    places = {one: place for place, one in enumerate(sorted(set(keys)))}
    for cell, one in zip(cells, keys):
        cell |= {axis: one[-1], f"{axis}_place": places[one]}


def _row(cell: Cell, dense: bool) -> tuple[Any, ...]:
    """Return what rows are sorted by, the title last."""
    if cell.get("model"):
        return (cell["model"], cell["batch"], f"{cell['model']} · {cell['batch']} x {cell['length']}")
    return (cell["family"],) if dense else (cell["batch"], f"batch {cell['batch']}")


def _column(cell: Cell, dense: bool) -> tuple[Any, ...]:
    """Return what columns are sorted by, the title last."""
    length, text, batch = _combination(cell)
    return (length, text, batch, f"{batch} x {text}") if dense else (length, text, text)
