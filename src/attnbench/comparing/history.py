"""Times of a cell over many commits: one series per cell and machine, and the steps in its level.

A point is ln(time of the cell / geometric mean of the two anchors of its run and workload): milliseconds of different
days say more about the days than about the code. All functions are pure; the commits of git are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from math import exp, log
from statistics import median
from typing import Literal

import numpy as np
from msgspec import Struct, structs

from attnbench.comparing.baselines import one_source
from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.measuring.anchors import anchors_beside, lacks_anchors
from attnbench.results.ratios import LEAST_STEP
from attnbench.results.records import is_anchor, is_timed, label
from attnbench.spec import Ok, Record, Workload

LEAST_POINTS = 6
"""Points of the shortest series in which steps are looked for."""
SHORTEST_LEVEL = 2
"""Points of the shortest level; one point on its own is an outlier."""
PENALTY = 3.0
"""Penalty of a piece, times noise times ln(points): no step in noise, but one of five times the noise."""
LEAST_NOISE = 0.002
"""Noise of a series at least, in logarithms: repeated values must not make the penalty vanish."""
MEDIAN_DISTANCE = 0.6745 * 2**0.5
"""Median distance of two neighbours in normal noise, in standard deviations."""

Commits = Sequence[tuple[str, str]]
"""Pairs (commit, subject), oldest first."""


class Source(Struct, frozen=True):
    """A run file or a baseline: its time and its records."""

    created: str
    records: Sequence[Record]
    places: Mapping[str, str] = {}
    """File or module of each function that was given by reference, by its name."""


class Point(Struct, frozen=True, kw_only=True):
    """A commit of a series."""

    commit: str
    """Commit of the runs; empty if it is not known, or if the tree had changes that no commit has."""
    created: str
    """Time of the latest run."""
    value: float
    """Median over the commit's runs."""
    runs: int = 1


class Key(Struct, frozen=True, kw_only=True):
    """Facts that must not differ within a series."""

    implementation: str
    workload: str
    fingerprint: str
    """Fingerprint of the machine and its libraries."""
    clock: str
    anchors: str
    """Fingerprint and clock of the anchors, which run in the worker of the first cell."""
    source: str = ""
    """File or module of a function that was given by reference: two functions of one name are two series."""


class Series(Struct, frozen=True, kw_only=True):
    """The points of a cell over commits on one machine, oldest first."""

    key: Key
    workload: Workload
    machine: str
    points: tuple[Point, ...]


class Change(Struct, frozen=True, kw_only=True):
    """A step from one level to the next."""

    direction: Literal["slower", "faster"]
    ratio: float
    """New level / old level."""
    position: int
    """Index of the first point of the new level."""
    old: str
    """Commit of the last point of the old level."""
    new: str
    """Commit of the first point of the new level."""
    suspects: tuple[tuple[str, str], ...] = ()
    """Pairs (commit, subject) of the commits between, oldest first; empty without git."""


class Excluded(Struct, frozen=True):
    """A record that is not a point of any series, and why."""

    cell: str
    created: str
    reason: str


class Trend(Struct, frozen=True):
    """A series with its changes."""

    series: Series
    changes: tuple[Change, ...]


def gather(
    sources: Iterable[Source], order: Mapping[str, int] | None = None, per_run: bool = False
) -> tuple[list[Series], list[Excluded]]:
    """Return the series of every timed cell, and the records that are left out.

    `order` is each commit's place in the history; without it, time decides. A commit is one point, the median of its
    runs; with `per_run` every run is a point.
    """
    found: dict[Key, list[tuple[Point, Ok]]] = {}
    excluded: list[Excluded] = []
    sources = list(sources)
    places = _spelled_alike(sources)
    for source in sources:
        for record in source.records:
            if not is_timed(record) or is_anchor(record):
                continue
            made = _point(record, source)
            if isinstance(made, str):
                excluded.append(Excluded(record.cell.id, source.created, made))
            else:
                place = places[record.implementation][source.places.get(record.implementation, "")]
                key = structs.replace(made[0], source=place)
                found.setdefault(key, []).append((made[1], record))
    series = [_series(key, points, order or {}, per_run) for key, points in found.items()]
    return sorted(series, key=lambda one: (one.key.workload, one.key.implementation)), excluded


def _spelled_alike(sources: Sequence[Source]) -> dict[str, dict[str, str]]:
    """Return for each function every spelling of its place -> the shortest that may mean the same.

    An unknown place is the only known one, if there is just one.
    """
    spellings: dict[str, set[str]] = {}
    for source in sources:
        for record in source.records:
            spellings.setdefault(record.implementation, set()).add(source.places.get(record.implementation, ""))
    alike: dict[str, dict[str, str]] = {}
    for name, found in spellings.items():
        known = sorted(found - {""}, key=lambda one: (len(one), one))
        alike[name] = {one: next(other for other in known if one_source(one, other)) for one in known}
        kept = set(alike[name].values())
        alike[name][""] = kept.pop() if len(kept) == 1 else ""
    return alike


def _point(record: Ok, source: Source) -> tuple[Key, Point] | str:
    environment, time = record.environment, record.time
    assert time is not None
    if environment is None:
        return "its environment is not known"
    anchors = {one.implementation: one for one in anchors_beside(record, source.records)}
    missing = [name for name in ANCHORS if name not in anchors]
    if missing:
        lacks = lacks_anchors(record, source.records, f"no {' and no '.join(missing)} for this workload")
        return f"its run has {lacks}"
    first, times = anchors[ANCHORS[0]], [one.time for one in anchors.values() if one.time is not None]
    key = Key(
        implementation=label(record),
        workload=record.workload.id,
        fingerprint=environment.fingerprint,
        clock=time.clock,
        anchors=f"{first.environment.fingerprint if first.environment else ''} {times[0].clock}",
    )
    value = log(time.median_ns) - sum(log(one.median_ns) for one in times) / len(times)
    commit = "" if environment.is_dirty else environment.commit
    return key, Point(commit=commit, created=source.created, value=value)


def _series(key: Key, found: Sequence[tuple[Point, Ok]], order: Mapping[str, int], per_run: bool) -> Series:
    record = found[0][1]
    assert record.environment is not None
    # Each run counts once: a baseline has the value of the run it was made of; two runs of one second differ in theirs.
    points = list({(point.commit, point.created, point.value): point for point, _ in found}.values())
    points = points if per_run else _per_commit(points)
    known = all(point.commit in order for point in points)
    points.sort(key=lambda point: (order[point.commit] if known else 0, point.created))
    return Series(key=key, workload=record.workload, machine=record.environment.device_name, points=tuple(points))


def _per_commit(points: Iterable[Point]) -> list[Point]:
    """Return one point per commit; a run without a commit is a point of its own."""
    groups: dict[str | int, list[Point]] = {}
    for number, point in enumerate(points):
        groups.setdefault(point.commit or number, []).append(point)
    return [
        Point(
            commit=group[0].commit,
            created=max(point.created for point in group),
            value=median(point.value for point in group),
            runs=len(group),
        )
        for group in groups.values()
    ]


class Level(Struct, frozen=True):
    """Consecutive points of one height; `start` is the first, `stop` follows the last."""

    start: int
    stop: int
    value: float
    """Median of the points, outliers between them left out."""


def find_changes(series: Series, between: Callable[[str, str], Commits] | None = None) -> tuple[Change, ...]:
    """Return the steps of a series; `between` lists the commits from one (excluded) to another (included)."""
    if detector_missing():
        return ()
    changes = []
    for before, after in pairwise(find_levels([point.value for point in series.points])):
        old, new = series.points[before.stop - 1].commit, series.points[after.start].commit
        changes.append(
            Change(
                direction="slower" if after.value > before.value else "faster",
                ratio=exp(after.value - before.value),
                position=after.start,
                old=old,
                new=new,
                suspects=tuple(between(old, new)) if between and old and new else (),
            )
        )
    return tuple(changes)


def detector_missing() -> str | None:
    """Return what to install before steps can be looked for; None if nothing is missing."""
    return None if find_spec("ruptures") else 'steps need ruptures: pip install "attnbench[history]"'


def find_levels(values: Sequence[float]) -> tuple[Level, ...]:
    """Return the levels of a series of logarithms: a single one if the series is steady or too short to tell.

    PELT finds the piecewise constant fit with the least absolute error plus a penalty per piece. The penalty follows
    from the noise, which the distances of neighbours show: a step changes one of them only.
    """
    series = np.asarray(values, float)
    if len(series) == 0:
        return ()
    whole = [list(range(len(series)))]
    pieces = _fitted_pieces(series) if len(series) >= LEAST_POINTS else whole
    pieces = [piece for piece in pieces if len(piece) >= SHORTEST_LEVEL] or whole
    while len(pieces) > 1:  # join the two neighbours that differ least, until all differ by a step
        gaps = np.abs(np.diff([np.median(series[piece]) for piece in pieces]))
        least = int(np.argmin(gaps))
        if gaps[least] >= log(LEAST_STEP):
            break
        pieces[least : least + 2] = [pieces[least] + pieces[least + 1]]
    return tuple(Level(piece[0], piece[-1] + 1, float(np.median(series[piece]))) for piece in pieces)


def _fitted_pieces(series: np.ndarray) -> list[list[int]]:
    from ruptures import Pelt
    from ruptures.costs import CostL1

    noise = max(float(np.median(np.abs(np.diff(series)))) / MEDIAN_DISTANCE, LEAST_NOISE)
    cost = CostL1()
    cost.min_size = 1  # a piece of one point is an outlier, and its own piece keeps it out of the levels beside it
    ends = Pelt(custom_cost=cost, min_size=1, jump=1).fit_predict(series, pen=PENALTY * noise * log(len(series)))
    return [list(range(start, end)) for start, end in pairwise([0, *ends])]
