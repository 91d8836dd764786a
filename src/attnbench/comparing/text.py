"""A comparison in words: who is faster, by how much, how surely, and how small a slowdown would have been seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from attnbench.comparing.statistics import Decision, clears, launches_text, published
from attnbench.comparison import Comparison, Launch
from attnbench.printable import printable
from attnbench.report import units

Interval = tuple[float, float]
MOST = 1000.0
"""Largest ratio that is printed; larger ones come from intervals over one or two launches."""
STYLES = {"faster": "green", "slower": "red", "same": "green", "inconclusive": "yellow"}
CALIBRATION = Path(__file__).with_name("calibration.json")
"""File with the measured error rates of verdicts, written by benchmarks/compare_calibration.py."""
WHERE = {"idle": "on an idle machine", "busy": "beside a busy process"}


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print a row per metric, then the notes, then the answer."""
    console.print(f"[bold]{escape(comparison.workload.title)}[/bold]")
    if comparison.estimates:
        console.print(_table(comparison))
    for note in comparison.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    console.print()
    style = STYLES.get(comparison.verdict or "", "red")
    if comparison.verdict in ("slower", "faster") and "cpu" in comparison.estimates:
        console.print(f"[dim]{escape(fine_print())}[/dim]", soft_wrap=True)
    console.print(f"[{style}]{escape(sentence(comparison))}[/{style}]", soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, header_style="bold", show_edge=False)
    table.add_column("time by")
    for heading in ("b / a", "interval", "by Student's t", "launches", "pairs", "could have seen"):
        table.add_column(heading, justify="right", no_wrap=True)
    for estimate in comparison.estimates.values():
        table.add_row(
            escape(estimate.metric),
            ratio_text(estimate.ratio),
            interval_text(estimate.interval),
            interval_text(estimate.t_interval),
            str(estimate.launches),
            str(estimate.pairs),
            _slowdown_text(estimate.detectable) or units.DASH,
        )
    return table


def sentence(comparison: Comparison) -> str:
    """Return the answer in one line, or why there is none. Sides of one name are written with their commits."""
    a, b = comparison.a, comparison.b
    if a == b and comparison.commit_a != comparison.commit_b:
        commits = (comparison.commit_a, comparison.commit_b)
        a, b = (f"{name} @ {commit[:12]}" if commit else name for name, commit in zip((a, b), commits))
    if comparison.verdict is None:
        return f"{b} was not compared with {a}: {comparison.reason or 'one of the two could not be timed'}"
    figures = "; ".join(
        f"{one.metric} {ratio_text(one.ratio)}, {interval_text(one.interval)}" for one in comparison.estimates.values()
    )
    if not figures and comparison.ratio is not None:
        figures = ratio_and_interval(comparison.ratio, comparison.interval)
    claim = f"{_claim_text(comparison, a, b)} ({figures})" if figures else _claim_text(comparison, a, b)
    return " · ".join(part for part in (claim, effort(comparison), comparison.reason) if part)


def _claim_text(comparison: Comparison, a: str, b: str) -> str:
    if comparison.verdict == "same":
        return f"{b} is as fast as {a}"
    if comparison.verdict == "inconclusive":
        return f"inconclusive whether {b} is slower than {a}"
    grounds = grounds_of(comparison)
    if grounds is None:
        return f"{b} is {comparison.verdict} than {a}"
    by = f" by {grounds.metric} time" if grounds.metric else ""
    factor = max(grounds.ratio, 1 / grounds.ratio)
    digits = 3 if factor < 1.1 else 2 if factor < 10 else 1
    return f"{b} is {factor:.{digits}f}x {comparison.verdict} than {a}{by}"


class Grounds(NamedTuple):
    """The figures that a verdict rests on; the metric is empty if they are the published ones."""

    metric: str
    ratio: float
    interval: Interval | None

    def __str__(self) -> str:
        return f"{self.metric} {ratio_and_interval(self.ratio, self.interval)}".strip()


def grounds_of(comparison: Comparison) -> Grounds | None:
    """Return the published ratio, unless only another metric clears the floor; None if nothing was timed."""
    if comparison.ratio is None:
        return None
    published = Grounds("", comparison.ratio, comparison.interval)
    others = (Grounds(one.metric, one.ratio, one.interval) for one in comparison.estimates.values())
    if comparison.verdict not in ("slower", "faster"):
        return published
    claim = comparison.verdict, comparison.floor
    certain = (one for one in (published, *others) if one.interval is not None and clears(one.interval, *claim))
    return next(certain, published)


def effort(comparison: Comparison) -> str:
    """Return how many launches and how much time it took, and how small a slowdown would have been seen."""
    launches = len(comparison.launches) or max((one.launches for one in comparison.estimates.values()), default=0)
    parts = [launches_text(launches)] if launches else []
    if comparison.elapsed_s:
        parts.append(units.duration(comparison.elapsed_s * 1e9))
    if seen := _slowdown_text(comparison.smallest_slowdown):
        parts.append(f"could have seen {seen}")
    return ", ".join(parts)


def _slowdown_text(slowdown: float | None) -> str:
    """Return the slowdown as text; empty if none that matters would have been seen."""
    return "" if slowdown is None or slowdown > MOST else units.percent(slowdown)


def ratio_and_interval(ratio: float, interval: Interval | None) -> str:
    """Return text such as 1.063 (1.041-1.085)."""
    return ratio_text(ratio) if interval is None else f"{ratio_text(ratio)} ({interval_text(interval)})"


def ratio_text(ratio: float) -> str:
    """Return a ratio with the digits that a few percent need."""
    return f"{MOST:g}+" if ratio > MOST else f"{ratio:.{3 if ratio < 10 else 1}f}"


def interval_text(interval: Interval) -> str:
    """Return both ends of an interval, such as 1.041-1.085."""
    return f"{ratio_text(interval[0])}-{ratio_text(interval[1])}"


def fine_print() -> str:
    """Return how often copies of one function were called slower or faster, with the 95 % bound."""
    rows = [row for row in json.loads(CALIBRATION.read_text(encoding="utf-8")) if row["effect"] == "same"]
    if not rows:
        return "How often a verdict is wrong on your functions has not been measured for this version."
    counts = [
        f"{row['wrong']} of {row['comparisons']} {WHERE[row['condition']]} (at most {100 * row['at_most']:.2g} %, 95 % "
        "confidence)"
        for row in sorted(rows, key=lambda row: row["condition"], reverse=True)
    ]
    machines = "; ".join(sorted({machine for row in rows for machine in row["machines"]}))
    return f"Copies of one function were called slower or faster in {' and in '.join(counts)}, measured on {machines}."


class ExperimentProgress:
    """A line on stderr about the running comparison, updated after each launch if stderr is a terminal."""

    def __init__(self, console: Console, quiet: bool) -> None:
        shown = console.is_terminal and not quiet
        self._title = ""
        self._lines = None if quiet or console.is_terminal else console
        """Console that gets a line per comparison if it is not a terminal, as in a CI job."""
        self._status = Status("starting both", console=console) if shown else None

    def __enter__(self) -> ExperimentProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, title: str) -> None:
        """Note that another comparison starts."""
        self._title = f"{escape(printable(title))} · "
        if self._lines is not None:
            self._lines.print(f"measuring {title}", markup=False, soft_wrap=True)
        if self._status is not None:
            self._status.update(f"{self._title}starting both")

    def __call__(self, launches: Sequence[Launch], decision: Decision | None) -> None:
        """Note that one more launch is over."""
        if self._status is None:
            return
        text = f"{self._title}launch {len(launches)}"
        if decision is not None and decision.estimates:
            main = decision.estimates[published(tuple(decision.estimates))]
            text += f" · ratio {main.ratio:.3f} ({main.interval[0]:.3f}-{main.interval[1]:.3f})"
        self._status.update(text)
