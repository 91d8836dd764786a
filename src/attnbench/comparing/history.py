"""Runs of many commits -> one series per cell and machine, and where its level changed.

A point is ln(time of the cell / geometric mean of the two anchors of its run and workload): milliseconds of different
days say more about the days than about the code. Pure functions; git's part is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import exp, log
from statistics import median
from typing import Literal

from msgspec import Struct, structs

from attnbench.comparing.level_changes import detector_missing, find_levels
from attnbench.comparing.same_machine import one_source
from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.measuring.anchors import anchors_beside, lacks_anchors
from attnbench.results.records import ANCHOR, is_timed, label
from attnbench.spec import Ok, Record, Workload

Commits = Sequence[tuple[str, str]]
"""(commit, subject), oldest first."""


class Source(Struct, frozen=True):
    """A run file or a baseline: when it was measured, and what."""

    created: str
    records: Sequence[Record]
    places: Mapping[str, str] = {}
    """File or module of the functions that were given by reference, by their names."""


class Point(Struct, frozen=True, kw_only=True):
    """A commit of a series."""

    commit: str
    """Empty if the run knew none, or was made with changes that its commit does not have."""
    created: str
    """Of its latest run."""
    value: float
    """Median over the commit's runs."""
    runs: int = 1


class Key(Struct, frozen=True, kw_only=True):
    """What must not differ within a series."""

    implementation: str
    workload: str
    fingerprint: str
    """Of the machine and its libraries."""
    clock: str
    anchors: str
    """Fingerprint and clock of the anchors, which run in the worker of the first cell."""
    source: str = ""
    """File or module of a function that was given by reference: two functions of one name are two series."""


class Series(Struct, frozen=True, kw_only=True):
    """A cell over commits on one machine, oldest first."""

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
    """First point of the new level."""
    old: str
    """Commit of the last point of the old level."""
    new: str
    """Commit of the first point of the new level."""
    suspects: tuple[tuple[str, str], ...] = ()
    """(commit, subject) of what lies between, oldest first; empty without git."""


class Excluded(Struct, frozen=True):
    """A record that is no point, and why."""

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
    """Series of every timed cell; `order` is each commit's place in the history, without it time decides.

    A commit is one point, the median of its runs, or with `per_run` every run is one.
    """
    found: dict[Key, list[tuple[Point, Ok]]] = {}
    excluded: list[Excluded] = []
    sources = list(sources)
    places = _spelled_alike(sources)
    for source in sources:
        for record in source.records:
            if not is_timed(record) or record.implementation.startswith(ANCHOR):
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
    """Return for each function every spelling of its place -> the shortest that may mean the same; one that is not
    known is the only one that is, if there is only one."""
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
    points = _distinct(point for point, _ in found)
    points = points if per_run else _per_commit(points)
    known = all(point.commit in order for point in points)
    points.sort(key=lambda point: (order[point.commit] if known else 0, point.created))
    return Series(key=key, workload=record.workload, machine=record.environment.device_name, points=tuple(points))


def _distinct(points: Iterable[Point]) -> list[Point]:
    """Each run once: a baseline is the run that it was made of, and has its value; two runs of one second have not."""
    return list({(point.commit, point.created, point.value): point for point in points}.values())


def _per_commit(points: Iterable[Point]) -> list[Point]:
    """One point per commit; a run without one is a point of its own."""
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


def find_changes(series: Series, between: Callable[[str, str], Commits] | None = None) -> tuple[Change, ...]:
    """Steps of a series; `between` lists the commits from one (not included) to another."""
    if detector_missing():
        return ()
    levels = find_levels([point.value for point in series.points])
    changes = []
    for before, after in pairwise(levels):
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
