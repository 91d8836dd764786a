"""Times of a cell over many commits: one series per cell and machine, the steps in its level, and both in words.

A point is ln(time of the cell / geometric mean of the two anchors of its run and workload): milliseconds of different
days say more about the days than about the code. The commits of git are passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from math import ceil, exp, log
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct, structs
from rich.console import Console

from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.measuring.anchors import anchors_beside, lacks_anchors
from attnbench.printable import printable, shortened
from attnbench.report.terminal import plain_table
from attnbench.report.units import significant
from attnbench.results.ratios import LEAST_STEP
from attnbench.results.records import is_anchor, is_timed, label
from attnbench.results.run_file import Run
from attnbench.results.sentences import capped, counted
from attnbench.run.git import commit_order, commits_between, is_ancestor, is_repository
from attnbench.run.user_functions import one_source
from attnbench.spec import Ok, Record, Workload

LEAST_POINTS = 6
"""Points of the shortest series in which steps are looked for."""
SHORTEST_LEVEL = 2
"""Points of the shortest level; one point on its own is an outlier."""
PENALTY = 3.0
"""Penalty of a piece, times noise times ln(points): no step in noise, but one of five times the noise."""
MARGIN = 2.0
"""How far a step of two points must exceed its penalty to be found in 19 of 20 series, times noise."""
MOST_NAMED = 10.0
"""Largest step that is named as one that noise may hide, as a share."""
LEAST_NOISE = 0.002
"""Noise of a series at least, in logarithms: repeated values must not make the penalty vanish."""
DISTANCES = {0.5: 0.6745 * 2**0.5, 0.75: 1.1503 * 2**0.5}
"""Quantiles of the distance of two neighbours in normal noise, in standard deviations. The upper one is there for code
of two speeds, most of whose neighbours have the same one."""
MOST_OVERLAP = 0.1
"""Largest share of pairs of points, one of either level, whose order is not that of the levels."""
BLOCKS = "▁▂▃▄▅▆▇█"
WIDEST = 40
LEAST_SPAN = 0.05
"""Least height of a sparkline in logarithms: noise of 1 % must not look like a mountain range."""
SHORT = 12
MOST_SENTENCES = 5
MOST_SUSPECTS = 3

Commits = Sequence[tuple[str, str]]
"""Pairs (commit, subject), oldest first."""
Between = Callable[[str, str], Commits | None]
"""Function that lists the commits from one (excluded) to another (included): nothing if one is not known, None if the
first is no ancestor of the second."""


class HistoryFile(Struct, frozen=True):
    """A run file, or a baseline as a run of its record and anchors."""

    run: Run
    places: Mapping[str, str] = {}
    """File or module of each function that was given by reference, by its name."""


class CommitPoint(Struct, frozen=True, kw_only=True):
    """A commit of a series."""

    commit: str
    """Commit of the runs; empty if it is not known, or if the tree had changes that no commit has."""
    created: str
    """Time of the oldest run: a commit that is measured again later is no newer for it."""
    value: float
    """Median over the commit's runs."""
    runs: int = 1


class Key(Struct, frozen=True, kw_only=True):
    """Facts that must not differ within a series."""

    implementation: str
    workload: str
    fingerprint: str
    processor: str = ""
    """Kind of the processor; empty if it is not known, or if runs on several kinds have the same fingerprint."""
    clock: str
    anchors: str
    """Fingerprint and clock of the anchors, which run in the worker of the first cell."""
    source: str = ""
    """File or module of a function that was given by reference: two functions of one name are two series."""


class CommitSeries(Struct, frozen=True, kw_only=True):
    """Points of a cell over commits on one machine, oldest first."""

    key: Key
    workload: Workload
    machine: str
    points: tuple[CommitPoint, ...]


class LevelChange(Struct, frozen=True, kw_only=True):
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
    """Pairs (commit, subject) of the commits between, oldest first; empty without git, or if there is no line between
    the two."""
    diverged: bool = False
    """Whether the old commit is no ancestor of the new one, so that no commit between them need have caused it."""


class Excluded(Struct, frozen=True):
    """A record that is not a point of any series, and why."""

    cell: str
    created: str
    reason: str


class Trend(Struct, frozen=True):
    """A series with its changes."""

    series: CommitSeries
    changes: tuple[LevelChange, ...]


def commits_in_git(records: Iterable[Record]) -> tuple[dict[str, int], Between]:
    """Return the position of each commit in git's history, empty outside a repository, and what lists commits between
    two of them."""
    environments = [record.environment for record in records if record.environment is not None]
    commits = {one.commit for one in environments if not one.is_dirty} - {""}
    places = commit_order(commits) if commits and is_repository() else {}

    @cache  # many cells change at the same commit
    def between(old: str, new: str) -> Commits | None:
        if old not in places or new not in places:
            return []
        return commits_between(old, new) if is_ancestor(old, new) else None

    return places, between


def gather(
    sources: Iterable[HistoryFile], order: Mapping[str, int] | None = None, per_run: bool = False
) -> tuple[list[CommitSeries], list[Excluded]]:
    """Return the series of every timed cell, and the records that are left out.

    `order` is each commit's place in the history. A run whose commit has no place there comes after the last commit
    that had been measured by then, so that without any `order` the points are ordered by time. A commit is one point,
    the median of its runs; with `per_run` every run is a point.
    """
    measured: dict[Key, list[tuple[CommitPoint, Ok]]] = {}
    excluded: list[Excluded] = []
    sources = list(sources)
    places, kinds = _spelled_alike(sources), _only_processors(sources)
    for source in sources:
        for when, record in source.run.dated:
            if not is_timed(record) or is_anchor(record):
                continue
            point = _point(record, source.run.records, when)
            if isinstance(point, str):
                excluded.append(Excluded(record.cell.id, when, point))
            else:
                place = places[record.implementation][source.places.get(record.implementation, "")]
                kind = point[0].processor or kinds.get(point[0].fingerprint, "")
                key = structs.replace(point[0], source=place, processor=kind)
                measured.setdefault(key, []).append((point[1], record))
    series: list[CommitSeries] = []
    for key, found in measured.items():
        record = found[0][1]
        assert record.environment is not None
        # Each run counts once: a baseline has the value of its run; two runs of one second differ in theirs.
        points = list({(point.commit, point.created, point.value): point for point, _ in found}.values())
        points = tuple(_in_order(points if per_run else _per_commit(points), order or {}))
        machine = record.environment.device_name
        series.append(CommitSeries(key=key, workload=record.workload, machine=machine, points=points))
    return sorted(series, key=lambda one: (one.key.workload, one.key.implementation)), excluded


def _spelled_alike(sources: Sequence[HistoryFile]) -> dict[str, dict[str, str]]:
    """Return for each function every spelling of its place -> the shortest that may mean the same. An unknown place is
    the only known one, if there is just one."""
    spellings: dict[str, set[str]] = {}
    for source in sources:
        for record in source.run.records:
            spellings.setdefault(record.implementation, set()).add(source.places.get(record.implementation, ""))
    alike: dict[str, dict[str, str]] = {}
    for name, found in spellings.items():
        known = sorted(found - {""}, key=lambda one: (len(one), one))
        alike[name] = {one: next(other for other in known if one_source(one, other)) for one in known}
        kept = set(alike[name].values())
        alike[name][""] = kept.pop() if len(kept) == 1 else ""
    return alike


def _only_processors(sources: Sequence[HistoryFile]) -> dict[str, str]:
    """Return for each fingerprint the only known kind of processor, which an unknown one is taken for."""
    kinds: dict[str, set[str]] = {}
    for environment in (record.environment for source in sources for record in source.run.records):
        if environment is not None and environment.processor:
            kinds.setdefault(environment.fingerprint, set()).add(environment.processor)
    return {fingerprint: found.pop() for fingerprint, found in kinds.items() if len(found) == 1}


def _point(record: Ok, records: Sequence[Record], when: str) -> tuple[Key, CommitPoint] | str:
    environment, time = record.environment, record.time
    assert time is not None
    if environment is None:
        return "its environment is unknown"
    anchors = {one.implementation: one for one in anchors_beside(record, records)}
    if missing := [name for name in ANCHORS if name not in anchors]:
        lacks = lacks_anchors(record, records, f"no {' and no '.join(missing)} for this workload")
        return f"its run has {lacks}"
    first, times = anchors[ANCHORS[0]], [one.time for one in anchors.values() if one.time is not None]
    key = Key(
        implementation=label(record),
        workload=record.workload.id,
        fingerprint=environment.fingerprint,
        processor=environment.processor,
        clock=time.clock,
        anchors=f"{first.environment.fingerprint if first.environment else ''} {times[0].clock}",
    )
    value = log(time.median_ns) - sum(log(one.median_ns) for one in times) / len(times)
    commit = "" if environment.is_dirty else environment.commit
    return key, CommitPoint(commit=commit, created=when, value=value)


def _in_order(points: Iterable[CommitPoint], order: Mapping[str, int]) -> list[CommitPoint]:
    """Return the points by the place of their commit, the others behind the last commit measured before them."""
    by_time = sorted(points, key=lambda point: point.created)
    placed: list[tuple[int, bool, CommitPoint]] = []
    latest = -1
    for point in by_time:
        unknown = point.commit not in order
        latest = latest if unknown else max(latest, order[point.commit])
        placed.append((latest if unknown else order[point.commit], unknown, point))
    return [point for _, _, point in sorted(placed, key=lambda entry: entry[:2])]


def _per_commit(points: Iterable[CommitPoint]) -> list[CommitPoint]:
    """Return one point per commit; a run without a commit is a point of its own."""
    groups: dict[str | int, list[CommitPoint]] = {}
    for number, point in enumerate(points):
        groups.setdefault(point.commit or number, []).append(point)
    merged: list[CommitPoint] = []
    for group in groups.values():
        created, value = min(point.created for point in group), median(point.value for point in group)
        merged.append(CommitPoint(commit=group[0].commit, created=created, value=value, runs=len(group)))
    return merged


class Level(NamedTuple):
    """Consecutive points of one height; `start` is the first, `stop` follows the last."""

    start: int
    stop: int
    value: float
    """Median of the points, outliers between them left out."""


def find_changes(series: CommitSeries, between: Between | None = None) -> tuple[LevelChange, ...]:
    """Return the steps of a series; `between` finds the suspects."""
    if detector_missing():
        return ()
    changes = []
    for before, after in pairwise(find_levels([point.value for point in series.points])):
        old, new = series.points[before.stop - 1].commit, series.points[after.start].commit
        suspects = between(old, new) if between and old and new else ()
        changes.append(
            LevelChange(
                direction="slower" if after.value > before.value else "faster",
                ratio=exp(after.value - before.value),
                position=after.start,
                old=old,
                new=new,
                suspects=tuple(suspects or ()),
                diverged=suspects is None,
            )
        )
    return tuple(changes)


def detector_missing() -> str | None:
    """Return what to install before steps can be found; None if nothing is missing."""
    return None if find_spec("ruptures") else 'steps need ruptures: pip install "attnbench[history]"'


def find_levels(values: Sequence[float]) -> tuple[Level, ...]:
    """Return the levels of a series of logarithms: a single one if the series is steady or too short to tell.

    PELT finds the piecewise constant fit with the least absolute error plus a penalty per piece. The penalty follows
    from the noise, which the distances of neighbours show: a step changes one of them only. Pieces are joined until
    the medians of any two neighbours differ by a step and their points hardly overlap.
    """
    series = np.asarray(values, float)
    if len(series) == 0:
        return ()
    whole = [list(range(len(series)))]
    pieces = _fitted_pieces(series) if len(series) >= LEAST_POINTS else whole
    pieces = [piece for piece in pieces if len(piece) >= SHORTEST_LEVEL] or whole
    # Join the two neighbours that differ least of those that are no step.
    while joined := [pair for pair in pairwise(pieces) if not _is_step(*(series[piece] for piece in pair))]:
        before, after = min(joined, key=lambda pair: abs(np.median(series[pair[0]]) - np.median(series[pair[1]])))
        place = pieces.index(before)
        pieces[place : place + 2] = [before + after]
    return tuple(Level(piece[0], piece[-1] + 1, float(np.median(series[piece]))) for piece in pieces)


def _is_step(before: np.ndarray, after: np.ndarray) -> bool:
    """Return whether the medians of two pieces differ by a step, and the ranks of their points hardly mix."""
    gap = np.median(after) - np.median(before)
    rises = np.sign(gap) * (after[:, None] - before[None, :])
    overlap = np.mean(rises < 0) + np.mean(rises == 0) / 2
    return bool(abs(gap) >= log(LEAST_STEP) and overlap <= MOST_OVERLAP)


def _fitted_pieces(series: np.ndarray) -> list[list[int]]:
    from ruptures import Pelt
    from ruptures.costs import CostL1

    cost = CostL1()
    cost.min_size = 1  # a piece of one point is an outlier, and its own piece keeps it out of the levels beside it
    ends = Pelt(custom_cost=cost, min_size=1, jump=1).fit_predict(series, pen=_penalty(series))
    return [list(range(start, end)) for start, end in pairwise([0, *ends])]


def _penalty(series: np.ndarray) -> float:
    return PENALTY * _noise(series) * log(len(series))


def _noise(series: np.ndarray) -> float:
    """Return the standard deviation that the distances of neighbours show."""
    distances = np.abs(np.diff(series))
    return max(LEAST_NOISE, *(float(np.quantile(distances, part)) / usual for part, usual in DISTANCES.items()))


def smallest_step(values: Sequence[float]) -> float:
    """Return the smallest step, as a share, that is almost surely found in a series of logarithms, even if only two
    points have the new level."""
    series = np.asarray(values, float)
    size = _penalty(series) / SHORTEST_LEVEL + MARGIN * _noise(series)
    return exp(max(log(LEAST_STEP), min(size, log(1 + MOST_NAMED)))) - 1


def describe_unseen(trends: Iterable[Trend]) -> str:
    """Return a sentence about the steps that the noise may hide; empty if every step that counts would be found."""
    values = [[point.value for point in trend.series.points] for trend in trends]
    shares = [smallest_step(one) for one in values if len(one) >= LEAST_POINTS]
    hidden = [ceil(round(100 * share, 6)) for share in shares if share > LEAST_STEP - 1 + 1e-9]
    if not hidden:
        return ""
    where = "" if len(shares) == 1 else f" in {len(hidden)} of {len(shares)}"
    least, most = min(hidden), max(hidden)
    span = f"{most} %" if least == most else f"{least} to {most} %"
    step = f"a step of less than {span}" if most < 100 * MOST_NAMED else "any step"
    return f"Noise may hide {step}{where}."


def print_history(console: Console, trends: Sequence[Trend], excluded: Iterable[Excluded]) -> None:
    """Print the table, and below it how many records are left out and why."""
    if trends:
        console.print(plain_table(_rows(trends)))
    reasons = Counter(one.reason for one in excluded)
    for reason, count in reasons.most_common():
        line = f"{counted(count, 'record')} left out: {shortened(reason)}."
        console.print(line, style="dim", markup=False, soft_wrap=True)


def _rows(trends: Sequence[Trend]) -> list[dict[str, str]]:
    machines = {(trend.series.key.fingerprint, trend.series.key.processor) for trend in trends}
    alike = len({fingerprint for fingerprint, _ in machines}) < len(machines)
    places = {(trend.series.key.implementation, trend.series.key.source) for trend in trends}
    namesakes = len({name for name, _ in places}) < len(places)
    return [
        {
            "implementation": trend.series.key.implementation,
            **({"source": trend.series.key.source} if namesakes else {}),
            "workload": trend.series.key.workload,
            **({"machine": _machine_text(trend.series, alike)} if len(machines) > 1 else {}),
            "commits": _commit_count(trend.series.points),
            "history": sparkline([point.value for point in trend.series.points]),
            "x anchors": significant(exp(trend.series.points[-1].value)),
            "changes": ", ".join(f"{size(change)} at {change.new[:SHORT] or '?'}" for change in trend.changes),
        }
        for trend in trends
    ]


def _machine_text(series: CommitSeries, with_processor: bool) -> str:
    kind = (series.key.processor or "unknown processor") if with_processor else ""
    return " ".join(filter(None, (series.machine, series.key.fingerprint, kind)))


def _commit_count(points: Sequence[CommitPoint]) -> str:
    """Return how many commits a series has, and how many runs without a commit."""
    commits = sum(bool(point.commit) for point in points)
    runs = len(points) - commits
    return " + ".join([str(commits)] * (commits > 0) + [counted(runs, "run")] * (runs > 0))


def sparkline(values: Sequence[float]) -> str:
    """Return the course of a series in blocks: one per point or, for long series, per few points."""
    heights = np.array([np.median(part) for part in np.array_split(np.asarray(values), min(len(values), WIDEST))])
    span = max(float(np.ptp(heights)), LEAST_SPAN)
    # A steady series lies in the middle of a block, not on the edge of two.
    lowest = heights.min() if np.ptp(heights) == span else np.median(heights) - span * 3.5 / len(BLOCKS)
    places = np.clip((heights - lowest) / span * len(BLOCKS), 0, len(BLOCKS) - 1).astype(int)
    return "".join(BLOCKS[place] for place in places)


def size(change: LevelChange) -> str:
    """Return the size of a change such as "1.06x slower"; the ratio is always above 1."""
    ratio = change.ratio if change.direction == "slower" else 1 / change.ratio
    return f"{ratio:.2f}x {change.direction}"


def closing(trends: Sequence[Trend], suggest: Callable[[Trend, LevelChange], str]) -> str:
    """Return what changed last in each series, regressions first, with the suspected commits and the command that
    `suggest` returns to confirm it, if there is one."""
    changed = [(trend, trend.changes[-1]) for trend in trends if trend.changes]
    if not changed:
        return _no_change(trends)
    changed.sort(key=lambda pair: (pair[1].direction == "faster", -abs(pair[1].ratio - 1)))
    sentences: list[str] = []
    for trend, change in changed:
        key, command = trend.series.key, suggest(trend, change)
        confirm = f" Confirm with `{command}`." if command else ""
        what = f"{key.implementation} on {key.workload} is {size(change)} {since(trend, change)}.{confirm}"
        sentences.append(printable(what))
    return "\n".join(capped(sentences, MOST_SENTENCES, "{} more series changed: see the table."))


def _no_change(trends: Sequence[Trend]) -> str:
    if not trends:
        return "There is no history to show: no timed record has anchors."
    if missing := detector_missing():
        return f"Steps were not searched for: {missing}."
    longest = max(len(trend.series.points) for trend in trends)
    if longest < LEAST_POINTS:
        what = "commits" if all(point.commit for trend in trends for point in trend.series.points) else "runs"
        return f"Too few {what} to find a step: {longest} at most, {LEAST_POINTS} are needed."
    count = sum(len(trend.series.points) >= LEAST_POINTS for trend in trends)
    if hidden := describe_unseen(trends):
        return f"No step was found in {count} series. {hidden}"
    return f"No step of {100 * (LEAST_STEP - 1):.0f} % or more in {count} series."


def since(trend: Trend, change: LevelChange) -> str:
    """Return which commits may have caused a change if git knows them, else after which run it was seen."""
    if len(change.suspects) == 1:
        return f"since {commit_text(*change.suspects[0])}"
    if change.suspects:
        shown = ", ".join(commit_text(*suspect) for suspect in change.suspects[-MOST_SUSPECTS:])
        more = f" and {len(change.suspects) - MOST_SUSPECTS} before" if len(change.suspects) > MOST_SUSPECTS else ""
        return f"by one of {len(change.suspects)} commits: {shown}{more}"
    if change.diverged:
        return f"in {change.new[:SHORT]} than in {change.old[:SHORT]}, which is on another branch"
    if change.old and change.new and change.old != change.new:
        return f"since a commit after {change.old[:SHORT]}, at the latest {change.new[:SHORT]}"
    return f"since the run of {trend.series.points[change.position].created}"


def commit_text(commit: str, subject: str) -> str:
    """Return the first digits of a commit, and its subject in quotes."""
    return f'{commit[:SHORT]} "{subject}"'
