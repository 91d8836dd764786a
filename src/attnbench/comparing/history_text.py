"""A history for the terminal: a line per series with a sparkline, and a sentence about each change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import exp

import numpy as np
from rich.console import Console

from attnbench.comparing.history import LEAST_POINTS, Change, Excluded, Trend, detector_missing
from attnbench.printable import printable, shortened
from attnbench.report.terminal import plain_table
from attnbench.report.units import significant
from attnbench.results.ratios import LEAST_STEP

BLOCKS = "▁▂▃▄▅▆▇█"
WIDEST = 40
LEAST_SPAN = 0.05
"""Least height of a sparkline in logarithms: noise of 1 % must not look like a mountain range."""
SHORT = 12
MOST_TOLD = 5
MOST_SUSPECTS = 3

Suggest = Callable[[Trend, Change], str]
"""Function that returns the command to confirm a change with; empty if there is none."""


def print_history(console: Console, trends: Sequence[Trend], excluded: Iterable[Excluded]) -> None:
    """Print the table, and below it how many records are left out and why."""
    if trends:
        console.print(plain_table(_rows(trends)), highlight=False)
    reasons = Counter(one.reason for one in excluded)
    for reason, count in reasons.most_common():
        line = f"{count} record{'' if count == 1 else 's'} left out: {shortened(reason)}."
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def _rows(trends: Sequence[Trend]) -> list[dict[str, str]]:
    several = len({trend.series.key.fingerprint for trend in trends}) > 1
    places = {(trend.series.key.implementation, trend.series.key.source) for trend in trends}
    namesakes = len({name for name, _ in places}) < len(places)
    return [
        {
            "implementation": trend.series.key.implementation,
            **({"source": trend.series.key.source} if namesakes else {}),
            "workload": trend.series.key.workload,
            **({"machine": f"{trend.series.machine} {trend.series.key.fingerprint}"} if several else {}),
            "commits": _count(trend),
            "history": sparkline([point.value for point in trend.series.points]),
            "x anchors": significant(exp(trend.series.points[-1].value)),
            "changes": ", ".join(f"{size(change)} at {change.new[:SHORT] or '?'}" for change in trend.changes),
        }
        for trend in trends
    ]


def _count(trend: Trend) -> str:
    """Return how many commits a series has, and how many runs without a commit."""
    commits = sum(bool(point.commit) for point in trend.series.points)
    runs = len(trend.series.points) - commits
    parts = [str(commits)] if commits else []
    return " + ".join([*parts, *([f"{runs} run{'' if runs == 1 else 's'}"] if runs else [])])


def sparkline(values: Sequence[float]) -> str:
    """Return the course of a series in blocks: one per point or, for long series, per few points."""
    heights = np.array([np.median(part) for part in np.array_split(np.asarray(values), min(len(values), WIDEST))])
    span = max(float(np.ptp(heights)), LEAST_SPAN)
    # A steady series lies in the middle of a block, not on the edge of two.
    lowest = heights.min() if np.ptp(heights) == span else np.median(heights) - span * 3.5 / len(BLOCKS)
    places = np.clip((heights - lowest) / span * len(BLOCKS), 0, len(BLOCKS) - 1).astype(int)
    return "".join(BLOCKS[place] for place in places)


def size(change: Change) -> str:
    """Return the size of a change such as "1.06x slower"; the ratio is always above 1."""
    ratio = change.ratio if change.direction == "slower" else 1 / change.ratio
    return f"{ratio:.2f}x {change.direction}"


def closing(trends: Sequence[Trend], suggest: Suggest) -> str:
    """Return what changed last in each series, regressions first, with the suspected commits and how to confirm."""
    changed = [(trend, trend.changes[-1]) for trend in trends if trend.changes]
    changed.sort(key=lambda pair: (pair[1].direction == "faster", -abs(pair[1].ratio - 1)))
    if not changed:
        return _no_change(trends)
    sentences = [_sentence(trend, change, suggest) for trend, change in changed[:MOST_TOLD]]
    left = len(changed) - len(sentences)
    return "\n".join([*sentences, *([f"{left} more series changed: see the table."] if left else [])])


def _no_change(trends: Sequence[Trend]) -> str:
    if not trends:
        return "There is no series: no timed record with anchors."
    if missing := detector_missing():
        return f"Steps were not looked for: {missing}."
    longest = max(len(trend.series.points) for trend in trends)
    if longest < LEAST_POINTS:
        what = "commits" if all(point.commit for trend in trends for point in trend.series.points) else "runs"
        return f"Too few {what} to find a step: {longest} at most, {LEAST_POINTS} are needed."
    count = sum(len(trend.series.points) >= LEAST_POINTS for trend in trends)
    return f"No step of {100 * (LEAST_STEP - 1):.0f} % or more in {count} series."


def _sentence(trend: Trend, change: Change, suggest: Suggest) -> str:
    key, command = trend.series.key, suggest(trend, change)
    confirm = f" Confirm with `{command}`." if command else ""
    return printable(f"{key.implementation} on {key.workload} is {size(change)} {since(trend, change)}.{confirm}")


def since(trend: Trend, change: Change) -> str:
    """Return which commits may have caused a change if git knows them, else after which run it was seen."""
    if len(change.suspects) == 1:
        return f"since {_commit(*change.suspects[0])}"
    if change.suspects:
        shown = ", ".join(_commit(*one) for one in change.suspects[-MOST_SUSPECTS:])
        more = f" and {len(change.suspects) - MOST_SUSPECTS} before" if len(change.suspects) > MOST_SUSPECTS else ""
        return f"by one of {len(change.suspects)} commits: {shown}{more}"
    if change.old and change.new and change.old != change.new:
        return f"somewhere after {change.old[:SHORT]} and up to {change.new[:SHORT]}"
    return f"since the run of {trend.series.points[change.position].created}"


def _commit(commit: str, subject: str) -> str:
    return f'{commit[:SHORT]} "{subject}"'
