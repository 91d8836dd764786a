"""What a chart that shows one thing at a time can show: a family of shapes (all of its batches, or one), or a cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, log
from typing import Any

from msgspec import Struct, structs

from attnbench.results.records import BASELINES

FEW_LENGTHS = 3
"""A batch size with so many lengths makes a curve worth seeing first."""
GAP = 0.12
"""Octaves between batches of one length."""
MOST_FEATURED = 6
"""Lines that are drawn firmly in one chart."""
Cells = Iterable[Mapping[str, Any]]


class Choice(Struct, frozen=True):
    """Rows of this family and, where one is named, this batch; or of this series."""

    text: str
    family: str = ""
    batch: int | None = None
    series: str = ""
    first: bool = False
    """Whether it is the first of its family."""
    named: list[str] = []
    """Implementations whose lines are drawn firmly."""

    def accepts(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is shown if this is chosen."""
        if self.series:
            return row["series"] == self.series
        return row["family"] == self.family and self.batch in (None, row["batch"])


def set_beside(cells: Sequence[dict[str, Any]]) -> None:
    """Give cells of batches that share a length places side by side, if their family is first shown at all batches."""
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
    """Return the choices of a chart: of families that make a curve the one with most cells first, of its batches the
    one with most lengths."""
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
    """Return a choice per series, in the order of the rows."""
    return [Choice(name, series=name) for name in dict.fromkeys(row["series"] for row in rows)]


def line_choices(cells: Cells, needs: str) -> list[Choice]:
    """Return the choices of a chart of lines, each with the names of those that are drawn firmly."""
    kept = [cell for cell in cells if cell.get(needs) is not None]
    found = family_choices(kept, needs)
    return [structs.replace(one, named=featured([cell for cell in kept if one.accepts(cell)])) for one in found]


def featured(rows: Sequence[Mapping[str, Any]], most: int = MOST_FEATURED) -> list[str]:
    """Return the labels of rows that a chart of lines names: plain ones, and those that lose least time to the winner
    of each shape, of names of one kernel the best; all of them if they are few."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    if len(labels) <= most:
        return labels
    ranked = sorted((row for row in rows if row.get("place") is not None), key=lambda row: row["place"])
    best: dict[tuple[str, int], float] = {}
    losses: dict[str, list[float]] = {}
    kernels: dict[str, dict[str, int]] = {}
    for row in ranked:
        first = best.setdefault((row["workload"], row["group"]), row["ns"])
        losses.setdefault(row["label"], []).append(log(row["ns"] / first))
        kernels.setdefault(row["label"], {})[row["workload"]] = row["kernel"]
    few = {name for name, logs in losses.items() if len(logs) <= len(best) / 2}
    mean = {name: sum(logs) / len(logs) + (name in few) for name, logs in losses.items()}

    def one_kernel(a: str, b: str) -> bool:
        ours, theirs = kernels.get(a, {}), kernels.get(b, {})
        both = ours.keys() & theirs.keys()
        return bool(both) and all(ours[key] == theirs[key] for key in both)

    plain = [name for name in BASELINES if name in labels]
    chosen = plain[:most]
    for name in sorted(set(labels) - set(plain), key=lambda name: (mean.get(name, inf), name)):
        if len(chosen) < most and not any(one_kernel(name, other) for other in chosen):
            chosen.append(name)
    return [name for name in labels if name in chosen]
