"""What a chart that shows one thing at a time can show: a family of shapes (all of its batches, or one), or a cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

FEW_LENGTHS = 3
"""A batch size with so many lengths makes a curve worth seeing first."""
GAP = 0.12
"""Octaves between batches of one length."""
Cells = Iterable[Mapping[str, Any]]


class Choice(Struct, frozen=True):
    """Rows of this family and, where one is named, this batch; or of this series."""

    text: str
    family: str = ""
    batch: int | None = None
    series: str = ""
    first: bool = False
    """Of its family."""

    def accepts(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is shown when this is chosen."""
        if self.series:
            return row["series"] == self.series
        return row["family"] == self.family and self.batch in (None, row["batch"])


def set_beside(cells: Sequence[dict[str, Any]]) -> None:
    """Where a family is first shown at all batches, those that share a length stand side by side: give them a place."""
    places: dict[tuple[str, int], set[int]] = {}
    for cell in cells:
        if cell.get("ns") is not None:
            places.setdefault((cell["family"], cell["len"]), set()).add(cell["batch"])
    together = {choice.family for choice in family_choices(cells, "ns") if choice.first and choice.batch is None}
    for cell in cells:
        batches = sorted(places.get((cell["family"], cell["len"]), ()))
        if cell["family"] in together and len(batches) > 1 and cell["batch"] in batches:
            cell["beside"] = cell["len"] * 2 ** (GAP * (batches.index(cell["batch"]) - (len(batches) - 1) / 2))


def family_choices(cells: Cells, needs: str) -> list[Choice]:
    """Of the families that make a curve the one with most cells first; of its batches, that with most lengths."""
    found: dict[str, dict[int, list[int]]] = {}
    for cell in cells:
        if cell.get(needs) is not None:
            found.setdefault(cell["family"], {}).setdefault(cell["batch"], []).append(cell["len"])
    return [choice for family in sorted(found, key=lambda name: _weight(found[name])) for choice in _of(family, found)]


def _weight(batches: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    lengths = [n for batch in batches.values() for n in batch]
    return -min(len(set(lengths)), FEW_LENGTHS), -len(lengths)


def _of(family: str, found: Mapping[str, Mapping[int, Sequence[int]]]) -> list[Choice]:
    counts = {batch: len(set(lengths)) for batch, lengths in found[family].items()}
    if len(counts) == 1:
        return [Choice(family, family, first=True)]
    curves = sorted((batch for batch in counts if counts[batch] > 1), key=lambda batch: (-counts[batch], batch))
    curved = bool(curves) and counts[curves[0]] >= FEW_LENGTHS
    single = [Choice(f"{family} · batch {one}", family, one, first=curved and one == curves[0]) for one in curves]
    every = Choice(f"{family} · all batches", family, first=not curved)
    return [*single, every] if curved else [every, *single]


def series_choices(rows: Cells) -> list[Choice]:
    """One per series, in the order of the rows."""
    return [Choice(name, series=name) for name in dict.fromkeys(row["series"] for row in rows)]
