"""Cells over several runs: their view, against the anchor kernels and never in bare milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import exp
from statistics import median
from typing import Any

from msgspec import Struct

from attnbench.comparing.history import (
    LEAST_POINTS,
    SHORT,
    Commits,
    Excluded,
    HistoryFile,
    Key,
    Trend,
    describe_unseen,
    detector_missing,
    find_changes,
    since,
    size,
)
from attnbench.comparing.history import gather as gather_series
from attnbench.report.html import charts
from attnbench.report.html.cells import Cells
from attnbench.report.html.sections import Section, ShapeNames
from attnbench.report.html.views import LABEL, SHAPE, Column, View, own
from attnbench.results.families import FRAMEWORKS
from attnbench.results.ratios import LEAST_STEP
from attnbench.results.run_file import NamedRun

LEAST_RUNS = 2
MOST_NAMED = 6
MINUTE, SECOND = len("2026-11-15T05:15"), len("2026-11-15T05:15:33")
SHORTEST = 7
"""Digits of a commit on an axis."""
LEAST_SPAN = 0.05
"""Least span of the axis, as a share: noise of 1 % must not look like a change."""
COLUMNS = [
    LABEL, SHAPE, Column("runs", "runs", "number"), Column("first", "x anchors at first", "ratio"),
    Column("last", "x anchors now", "ratio"), Column("moved", "since the first", "percent"),
    Column("changes", "changes of level"),
]  # fmt: skip
Rows = list[dict[str, Any]]


class History(Struct, frozen=True):
    """Cells that were timed in two runs or more, those that changed first."""

    trends: Sequence[Trend] = ()
    excluded: Sequence[Excluded] = ()
    runs: Sequence[str] = ()
    """Names of the runs that it was read from."""


NO_HISTORY = History()


def find_history(
    sources: Sequence[NamedRun],
    places: Mapping[str, int],
    between: Callable[[str, str], Commits | None] | None = None,
) -> History:
    """Return the history of every cell, a point per run; `places` orders commits that git knows, else time does."""
    if len(sources) < LEAST_RUNS:
        return NO_HISTORY
    series, excluded = gather_series([HistoryFile(source.run) for source in sources], places, per_run=True)
    trends = [Trend(one, find_changes(one, between)) for one in series if len(one.points) >= LEAST_RUNS]
    trends.sort(key=lambda trend: -max((abs(change.ratio - 1) for change in trend.changes), default=0.0))
    return History(trends, excluded, [source.name for source in sources])


def of_section(history: History, section: Section) -> list[Trend]:
    """Return the trends whose cells ran where the section did."""
    here = section.environments.values()

    def is_here(key: Key) -> bool:
        kinds = {one.processor for one in here if one.fingerprint == key.fingerprint}
        return bool(kinds) and ("" in kinds or key.processor in ("", *kinds))

    return [trend for trend in history.trends if is_here(trend.series.key)]


def history_view(history: History, section: Section, cells: Cells, labels: Sequence[str]) -> View:
    """Return the view of how the times of a section changed over its runs."""
    trends = of_section(history, section)
    if not trends:
        return View("history", "History", empty=_explain_no_history(history, section))
    runs = f"Runs: {', '.join(history.runs)}." if len(history.runs) <= MOST_NAMED else f"{len(history.runs)} runs."
    note = (
        "A point is a run: the time of the cell over that of the anchor kernels timed beside it, so that what slows "
        f"the whole machine down moves nothing here. {runs} {_describe_search(trends)}"
    )
    chart = charts.history(labels, point_rows(trends, cells.names))
    table = own(COLUMNS, trend_rows(trends, cells.names), "moved", True)
    return View("history", "History", note, [chart], table)


def _explain_no_history(history: History, section: Section) -> str:
    """Return why a section has no history, and what would give it one."""
    if len(section.runs) < LEAST_RUNS:
        return (
            "One run has no history: name two or more of one machine and its packages, "
            f"`attnbench report RUN1 RUN2 ...`; steps are looked for from {LEAST_POINTS} on."
        )
    reasons = Counter(one.reason for one in history.excluded)
    told = f": {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"No cell was timed beside anchor kernels in two of these runs{told}."


def _describe_search(trends: Sequence[Trend]) -> str:
    """Return a sentence on how steps were looked for and how many were found."""
    if missing := detector_missing():
        return f"Steps were not searched for: {missing}."
    lengths = [len(trend.series.points) for trend in trends]
    if max(lengths) < LEAST_POINTS:
        return f"Too few runs to find a step: {max(lengths)} at most, {LEAST_POINTS} are needed."
    changed = sum(bool(trend.changes) for trend in trends)
    looked = sum(length >= LEAST_POINTS for length in lengths)
    if hidden := describe_unseen(trends):
        return f"Steps were found in {changed} of {looked} cells. {hidden}"
    return f"{changed} of {looked} cells changed by {100 * (LEAST_STEP - 1):.0f} % or more."


def point_rows(trends: Sequence[Trend], names: ShapeNames) -> Rows:
    """Return a row per cell and run, for the chart."""
    stamps = {point.created for trend in trends for point in trend.series.points}
    # Up to the minute if that distinguishes all runs, else the second.
    length = MINUTE if len({stamp[:MINUTE] for stamp in stamps}) == len(stamps) else SECOND
    rows: Rows = []
    for trend, who in zip(trends, _identities(trends, names)):
        points = trend.series.points
        values = [point.value for point in points]
        steps = {change.position: size(change) for change in trend.changes}
        middle = exp(median(values))
        spread = {"least": middle * (1 - LEAST_SPAN / 2), "most": middle * (1 + LEAST_SPAN / 2)}
        ends = [0, *(change.position for change in trend.changes), len(values)]
        levels = [exp(median(values[start:stop])) for start, stop in pairwise(ends) for _ in range(start, stop)]
        for place, (point, level) in enumerate(zip(points, levels)):
            when = point.created[:length].replace("T", " ")
            rows.append(who | spread | {
                "place": place,
                "when": f"{when} {point.commit[:SHORTEST]}".rstrip(),
                "commit": point.commit[:SHORT] or None,
                "ratio": exp(point.value),
                "level": level,
                "step": steps.get(place),
                "late": place > len(points) / 2,
            })  # fmt: skip
    return rows


def trend_rows(trends: Sequence[Trend], names: ShapeNames) -> Rows:
    """Return a row per cell, for the table: where it stands, and what changed when."""
    rows: Rows = []
    for trend, who in zip(trends, _identities(trends, names)):
        first, last = trend.series.points[0], trend.series.points[-1]
        told = [f"{size(change)} {since(trend, change)}" for change in trend.changes]
        moved = exp(last.value - first.value) - 1
        figures = {"runs": len(trend.series.points), "first": exp(first.value), "last": exp(last.value), "moved": moved}
        rows.append(who | figures | {"changes": "; ".join(told) or None})
    return rows


def _identities(trends: Sequence[Trend], names: ShapeNames) -> Rows:
    """Return the name of each cell and the fields that the filters look at."""
    found: Rows = []
    for trend in trends:
        key, workload = trend.series.key, trend.series.workload
        framework = key.implementation.partition(".")[0]
        who = {"label": key.implementation, "framework": framework if framework in FRAMEWORKS else None}
        found.append(who | names.fields(workload) | {"series": f"{key.implementation} · {names.shape(workload)}"})
    twice = {name for name, count in Counter(one["series"] for one in found).items() if count > 1}
    for trend, one in zip(trends, found):
        if one["series"] in twice:
            one["series"] += f" · {trend.series.key.clock}, anchors {trend.series.key.anchors}"
    return found
