"""How time and memory grow with length: exponents with intervals, the class of growth, where compute-bound begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from attnbench.analyse.families import length
from attnbench.results.records import is_timed
from attnbench.spec import Ok, Record

NORMAL = 1.96
"""Half a 95 % interval in standard deviations."""
Growth = Literal["below O(n)", "O(n)", "between", "O(n^2)"]
BELOW_LINEAR, LINEAR, QUADRATIC = 0.8, 1.2, 1.8
"""Local exponents up to which growth is below O(n) and O(n), and from which on it is O(n^2)."""
ENOUGH_LENGTHS = 3
FAR_APART = 4
"""Two lengths say how a value grew if they are so many times apart; neither a class nor an interval."""


class Point(Struct, frozen=True, kw_only=True):
    """A measured value at one length."""

    length: int
    value: float
    spread: float | None = 0.0
    """Standard deviation of ln(value): 0 for a count, None where it is not known."""
    theory: float | None = None
    """What the value should be proportional to."""


class Slope(Struct, frozen=True):
    """An exponent: value ~ length ** exponent."""

    exponent: float
    interval: tuple[float, float] | None
    """At 95 %; None for two lengths, which lie on any line, and where a round says nothing of its own spread."""
    theory: float | None
    """Exponent of the theory at the same lengths."""


class Fit(Struct, frozen=True, kw_only=True):
    """How a value grows over all measured lengths, and at the long end."""

    overall: Slope
    local: Slope
    """Between the two longest lengths, where fixed costs weigh least."""
    lengths: tuple[int, ...]

    @property
    def growth(self) -> Growth | None:
        """Class of the growth at the long end; None from two lengths."""
        return growth(self.local.exponent) if len(self.lengths) >= ENOUGH_LENGTHS else None

    @property
    def growth_in_theory(self) -> Growth | None:
        """The class that it should have; None from two lengths."""
        return growth(self.local.theory) if len(self.lengths) >= ENOUGH_LENGTHS else None


class Regime(Struct, frozen=True):
    """Where the arithmetic, not the memory traffic, sets the ceiling: of the shapes' FLOPs and bytes alone, whoever
    runs them. One that stays far below its ceiling is bound by something else."""

    begins: Literal["always", "never", "from"]
    """always and never: at every measured length, at none."""
    length: int | None = None
    """Shortest from which all longer ones are compute-bound."""
    below: int | None = None
    """Longest that is not."""


def exponent(points: Sequence[Point]) -> Fit | None:
    """Regress ln(value) on ln(length); None for fewer than three lengths unless two are far apart.

    The interval joins what the rounds say of each point with how far the points are from a straight line.
    """
    lengths = sorted({point.length for point in points})
    if len(lengths) < 2 or (len(lengths) < ENOUGH_LENGTHS and lengths[-1] < FAR_APART * lengths[0]):
        return None
    longest = [point for point in points if point.length in lengths[-2:]]
    overall, local = _slope(points), _slope(longest)
    if len(lengths) < ENOUGH_LENGTHS:
        overall, local = (replace(slope, interval=None) for slope in (overall, local))
    return Fit(overall=overall, local=local, lengths=tuple(lengths))


def time_points(records: Iterable[Record]) -> list[Point]:
    """Medians of timed records; theory is the FLOPs."""
    points = []
    for record in records:
        if is_timed(record) and record.time is not None:
            time, spread = record.time, None
            if time.ci95_ns is not None:
                spread = (time.ci95_ns[1] - time.ci95_ns[0]) / 2 / NORMAL / time.median_ns
            n = length(record.workload)
            points.append(Point(length=n, value=time.median_ns, spread=spread, theory=record.cost.flops))
    return points


def memory_points(records: Iterable[Record]) -> list[Point]:
    """Peaks that were measured; theory is what must be stored."""
    return [
        Point(length=length(r.workload), value=r.memory.peak_bytes, theory=r.memory.theory_bytes or None)
        for r in records
        if isinstance(r, Ok) and r.memory.peak_bytes
    ]


def growth(exponent: float | None) -> Growth | None:
    """Class of an exponent at the long end."""
    if exponent is None:
        return None
    if exponent < BELOW_LINEAR:
        return "below O(n)"
    return "O(n)" if exponent <= LINEAR else "O(n^2)" if exponent >= QUADRATIC else "between"


def compute_bound(records: Iterable[Record]) -> Regime | None:
    """Where compute-bound begins along the length of one track, whoever ran; None where no ceiling was measured."""
    bounds = sorted((length(r.workload), r.cost.bound) for r in records if isinstance(r, Ok) and r.cost.bound)
    if not bounds:
        return None
    below = max((n for n, bound in bounds if bound != "compute"), default=None)
    if below is None:
        return Regime("always", bounds[0][0])
    above = [n for n, _ in bounds if n > below]
    return Regime("from", above[0], below) if above else Regime("never", None, below)


def _slope(points: Sequence[Point]) -> Slope:
    x = np.log([point.length for point in points])
    away = x - x.mean()
    pull = away / (away @ away)
    y = np.log([point.value for point in points])
    value = float(pull @ y)
    theories = [point.theory for point in points]
    known = [theory for theory in theories if theory]
    theory = float(pull @ np.log(known)) if len(known) == len(points) else None
    return Slope(value, _interval(points, pull, y - y.mean() - value * away, value), theory)


def _interval(
    points: Sequence[Point], pull: np.ndarray, residuals: np.ndarray, value: float
) -> tuple[float, float] | None:
    spreads = [point.spread for point in points if point.spread is not None]
    if len(spreads) < len(points):
        return None
    sampled = NORMAL * float(np.linalg.norm(pull * np.array(spreads)))
    free = len(points) - 2
    bent = _student(free) * float(np.sqrt(residuals @ residuals / free) * np.linalg.norm(pull)) if free else 0.0
    half = float(np.hypot(sampled, bent))
    return value - half, value + half


def _student(free: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(free, 0.975))
