"""Who is first on a shape, and who is next: names of one kernel are one. The page does the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from attnbench.report.html.packing import rounded

Cell = Mapping[str, Any]


class Podium(Struct, frozen=True):
    """Of the exact cells of one shape."""

    first: Cell
    same: list[str]
    """Other names of its kernel."""
    second: Cell | None

    @property
    def close(self) -> bool:
        """Whether the next is too close to call."""
        return self.second is not None and self.second["rank"] == self.first["rank"]


def podium(cells: Iterable[Cell]) -> Podium:
    """`cells`: those with a time, one at least."""
    kept: dict[Any, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell["plain"]):
        number = cell.get("kernel")
        key = cell["label"] if number is None else (number, cell["rank"])
        kept.setdefault(key, []).append(cell)
    first, *others = sorted(kept.values(), key=lambda names: rounded(names[0]["ns"]))
    return Podium(first[0], [cell["label"] for cell in first[1:]], others[0][0] if others else None)


def shapes_of(cells: Iterable[Cell]) -> list[Podium]:
    """The same of every shape that something exact was timed on, in the order of the cells."""
    places: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.get("ns") is not None and cell["exact"]:
            places.setdefault(cell["workload"], []).append(cell)
    return [podium(found) for found in places.values()]
