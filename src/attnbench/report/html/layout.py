"""Layout of rows: shapes on the winner maps, batches side by side, and the choices of a chart that shows one family of
shapes (all of its batches, or one) or one cell at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from msgspec import Struct, structs

from attnbench.results.records import BASELINES, grouped
from attnbench.results.standings import Standings
from attnbench.results.tally import Tally

MOST_COLUMNS = 12
MOST_MAPS = 12
"""Most winner maps; further families stand in the table, as a family of one shape does."""
MODELS = "models"
FEW_LENGTHS = 3
"""Lengths that make a curve: a batch size with as many is shown first."""
GAP = 0.12
"""Octaves between batches of one length."""
MOST_FEATURED = 6
"""Lines that are drawn firmly in one chart."""
Cell = dict[str, Any]
Combination = tuple[int, str, int]
"""Length as a number and as text, batch: the key by which places are sorted."""


class WinnerMap(Struct, frozen=True):
    """One map: cells with its number in `map` lie on it."""

    number: int
    title: str
    """The family, if the map is of one; else its rows name their families."""
    columns: str
    """Title of its columns; empty if there are none."""


def lay_out(cells: Sequence[Cell]) -> list[WinnerMap]:
    """Give every cell that lies on a map its row and column; the largest map first. Families that were measured at the
    same few combinations of batch and length share a map, with a row for each. One of many combinations has a map to
    itself, a row per batch. Shapes of models lie on no grid: a map of rows without columns."""
    found = sorted(_groups(cells).items(), key=lambda item: -len({cell["workload"] for cell in item[1]}))
    maps = []
    for number, (title, members) in enumerate(found[:MOST_MAPS]):
        grid = [cell for cell in members if not cell.get("model")]
        dense = len(set(map(_combination, grid))) <= MOST_COLUMNS
        alone = len({cell["family"] for cell in grid}) == 1
        rows: list[tuple[Any, ...]] = []  # what rows and columns are sorted by, the title last
        for cell in members:
            key = (cell["family"],) if dense else (cell["batch"], f"batch {cell['batch']}")
            if model := cell.get("model"):
                key = model, cell["batch"], f"{model} · {cell['batch']} x {cell['length']}"
            rows.append(key)
        _set_places("row", members, rows)
        titles = [f"{cell['batch']} x {cell['length']}" if dense else cell["length"] for cell in grid]
        keys = [(cell["len"], cell["length"], *([cell["batch"]] * dense), title) for cell, title in zip(grid, titles)]
        _set_places("column", grid, keys)
        for cell in members:
            cell["map"] = number
        columns = "" if not grid else "Batch x length (tokens)" if dense else "Length (tokens)"
        maps.append(WinnerMap(number, title if alone and not dense else "", columns))
    return maps


def _groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return title -> the cells of a map with two shapes or more. A family whose combinations all lie on the map of
    another family is a row of that map: an interrupted run leaves some families with fewer shapes than others, and one
    map must still show all of them."""
    families = grouped(cells, lambda cell: MODELS if cell.get("model") else cell["family"])
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


def _set_places(axis: str, cells: Sequence[Cell], keys: Sequence[tuple[Any, ...]]) -> None:
    places = {one: place for place, one in enumerate(sorted(set(keys)))}
    for cell, one in zip(cells, keys):
        cell |= {axis: one[-1], f"{axis}_place": places[one]}


class RowFilter(Struct, frozen=True):
    """Rows of a family and, if one is named, a batch; or of a series."""

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


def set_beside(cells: Sequence[Cell]) -> None:
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


def family_choices(cells: Iterable[Mapping[str, Any]], needs: str) -> list[RowFilter]:
    """Return the choices of a chart: of families that make a curve the one with most cells first, of its batches the
    one with most lengths."""
    found: dict[str, dict[int, list[int]]] = {}
    for cell in cells:
        if cell.get(needs) is not None:
            found.setdefault(cell["family"], {}).setdefault(cell["batch"], []).append(cell["len"])

    def weight(family: str) -> tuple[int, int]:
        lengths = [n for batch in found[family].values() for n in batch]
        return -min(len(set(lengths)), FEW_LENGTHS), -len(lengths)

    choices: list[RowFilter] = []
    for family in sorted(found, key=weight):
        counts = {batch: len(set(lengths)) for batch, lengths in found[family].items()}
        if len(counts) == 1:
            choices.append(RowFilter(family, family, first=True))
            continue
        curves = sorted((batch for batch in counts if counts[batch] > 1), key=lambda batch: (-counts[batch], batch))
        curved = bool(curves) and counts[curves[0]] >= FEW_LENGTHS
        single = [
            RowFilter(f"{family} · batch {one}", family, one, first=curved and one == curves[0]) for one in curves
        ]
        every = RowFilter(f"{family} · all batches", family, first=not curved)
        choices += [*single, every] if curved else [every, *single]
    return choices


def line_choices(cells: Iterable[Mapping[str, Any]], needs: str, standings: Standings) -> list[RowFilter]:
    """Return the choices of a chart of lines, each with the names of those that are drawn firmly."""
    kept = [cell for cell in cells if cell.get(needs) is not None]
    found: list[RowFilter] = []
    for choice in family_choices(kept, needs):
        rows = [cell for cell in kept if choice.accepts(cell)]
        keys = dict.fromkeys(row["workload"] for row in rows)
        tally = Tally({f"{key} {n}": one for key in keys for n, one in enumerate(standings.apart(key))})
        names = featured(list(dict.fromkeys(row["label"] for row in rows)), tally)
        found.append(structs.replace(choice, named=names))
    return found


def featured(labels: Sequence[str], tally: Tally, most: int = MOST_FEATURED) -> list[str]:
    """Return the labels that a chart of lines names: plain implementations, and those that lose least time to the
    winner of each shape, of names of one kernel the best; all labels if they are few."""
    if len(labels) <= most:
        return list(labels)

    def loss(name: str) -> tuple[float, str]:
        if name not in tally.names:
            return inf, name
        rare = 2 * len(tally.pairs(name, name)) <= len(tally.standings)
        return tally.mean_loss(name) + rare, name

    plain = [name for name in BASELINES if name in labels]
    chosen = plain[:most]
    for name in sorted(set(labels) - set(plain), key=loss):
        if len(chosen) < most and (name not in tally.names or set(chosen).isdisjoint(tally.same_kernel(name))):
            chosen.append(name)
    return [name for name in labels if name in chosen]
