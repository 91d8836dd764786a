"""How time and memory grow with length: exponents with intervals, and the length at which memory runs out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from attnbench.results.advice import Figure, Recommendation, advise_family, listed, rounded
from attnbench.results.families import Track, length
from attnbench.results.records import is_timed
from attnbench.spec import Ok, OutOfMemory, Record
from attnbench.workloads.cost import demand

NORMAL = 1.96
"""Half a 95 % interval in standard deviations."""
Growth = Literal["below O(n)", "O(n)", "between", "O(n^2)"]
BELOW_LINEAR, LINEAR, QUADRATIC = 0.8, 1.2, 1.8
"""Local exponents up to which growth is below O(n) and O(n), and from which on it is O(n^2)."""
ENOUGH_LENGTHS = 3
FAR_APART = 4
"""Ratio of two lengths from which on they give an exponent; neither a class of growth nor an interval."""
FARTHEST = 1 << 32
REACH = 8
"""Times the longest measured length: beyond it, how an implementation grows is not known."""
INSTEAD = "; beyond, use one that does not store the scores"
Model = Callable[[int], float]
"""Length -> bytes."""


class MeasuredLength(Struct, frozen=True, kw_only=True):
    """A measured value at one length."""

    length: int
    value: float
    spread: float | None = 0.0
    """Standard deviation of ln(value): 0 for a count, None if it is not known."""
    theory: float | None = None
    """Value in theory, up to a constant factor."""


class Slope(Struct, frozen=True):
    """An exponent: value ~ length ** exponent."""

    exponent: float
    interval: tuple[float, float] | None
    """Interval at 95 %; None for two lengths, which lie on any line, and if the spread of a point is not known."""
    theory: float | None
    """Exponent of the theory at the same lengths."""


class Fit(Struct, frozen=True, kw_only=True):
    """How a value grows over all measured lengths, and at the long end."""

    overall: Slope
    local: Slope
    """Slope between the two longest lengths, where fixed costs weigh least."""
    lengths: tuple[int, ...]

    @property
    def growth(self) -> Growth | None:
        """Class of the growth at the long end; None from two lengths."""
        return growth(self.local.exponent) if len(self.lengths) >= ENOUGH_LENGTHS else None

    @property
    def growth_in_theory(self) -> Growth | None:
        """Class of the growth in theory; None from two lengths."""
        return growth(self.local.theory) if len(self.lengths) >= ENOUGH_LENGTHS else None


class Regime(Struct, frozen=True):
    """Lengths at which the FLOPs of a shape and not its bytes set the ceiling, whichever implementation runs it. An
    implementation far below its ceiling is bound by something else."""

    begins: Literal["always", "never", "from"]
    """At every measured length, at none, or from `length` on."""
    length: int | None = None
    """Shortest length from which all longer ones are compute-bound."""
    below: int | None = None
    """Longest length that is not compute-bound."""


class Limit(Struct, frozen=True, kw_only=True):
    """Length up to which one call and its inputs fit on an otherwise empty device; estimates have two digits."""

    length: int
    low: int
    high: int
    """Bounds from two models of growth, and from what was seen to fit and not to fit."""
    memory_bytes: int
    longest_measured: int
    out_of_memory_at: int | None = None
    """Shortest length that ran out of memory."""


def exponent(points: Sequence[MeasuredLength]) -> Fit | None:
    """Fit ln(value) against ln(length); return None for fewer than three lengths unless two are far apart. The interval
    combines the spread of each point with the distance of the points from a straight line."""
    lengths = sorted({point.length for point in points})
    if len(lengths) < 2 or (len(lengths) < ENOUGH_LENGTHS and lengths[-1] < FAR_APART * lengths[0]):
        return None
    longest = [point for point in points if point.length in lengths[-2:]]
    overall, local = _slope(points), _slope(longest)
    if len(lengths) < ENOUGH_LENGTHS:
        overall, local = (replace(slope, interval=None) for slope in (overall, local))
    return Fit(overall=overall, local=local, lengths=tuple(lengths))


def time_points(records: Iterable[Record]) -> list[MeasuredLength]:
    """Return the medians of timed records, with their FLOPs as theory."""
    points = []
    for record in records:
        if is_timed(record) and record.time is not None:
            time, half, n = record.time, record.time.half_width, length(record.workload)
            spread = None if half is None else half / NORMAL
            points.append(MeasuredLength(length=n, value=time.median_ns, spread=spread, theory=record.cost.flops))
    return points


def memory_points(records: Iterable[Record]) -> list[MeasuredLength]:
    """Return the peaks that were measured, with the bytes that must be stored as theory."""
    return [
        MeasuredLength(length=length(r.workload), value=r.memory.peak_bytes, theory=r.memory.theory_bytes or None)
        for r in records
        if isinstance(r, Ok) and r.memory.peak_bytes
    ]


def growth(exponent: float | None) -> Growth | None:
    """Return the class of an exponent at the long end."""
    if exponent is None:
        return None
    if exponent < BELOW_LINEAR:
        return "below O(n)"
    return "O(n)" if exponent <= LINEAR else "O(n^2)" if exponent >= QUADRATIC else "between"


def compute_bound(records: Iterable[Record]) -> Regime | None:
    """Return where along one track shapes become compute-bound; None if no ceiling was measured."""
    bounds = sorted((length(r.workload), r.cost.bound) for r in records if isinstance(r, Ok) and r.cost.bound)
    if not bounds:
        return None
    below = max((n for n, bound in bounds if bound != "compute"), default=None)
    if below is None:
        return Regime("always", bounds[0][0])
    above = [n for n, _ in bounds if n > below]
    return Regime("from", above[0], below) if above else Regime("never", None, below)


def stores_scores(record: Ok) -> bool:
    """Return whether an implementation keeps the scores in memory, as theory counts its bytes."""
    return record.memory.theory_bytes > demand(record.workload).output_bytes


def fits_until(records: Sequence[Record], memory_bytes: int | None = None) -> Limit | None:
    """Return the limit of one implementation along a track, by default in the memory of the device it ran on. None if
    fewer than two peaks were measured, the memory is not known, the scores are not stored (peaks grow with the inputs
    then) or the limit is too far beyond what was measured."""
    measured = [r for r in records if isinstance(r, Ok) and r.memory.peak_bytes]
    points = memory_points(measured)
    known = [r.environment.memory_bytes for r in measured if r.environment is not None]
    budget = memory_bytes or (known[-1] if known else None)
    if budget is None or len({point.length for point in points}) < 2 or not all(map(stores_scores, measured)):
        return None
    inputs = _inputs(measured)
    answers = [
        bisect_right(range(1, FARTHEST), budget, key=lambda n, peak=peak: peak(n) + inputs(n))
        for peak in (_polynomial(points), _power(points))
    ]
    longest = max(point.length for point in points)
    failed = [n for r in records if isinstance(r, OutOfMemory) and (n := length(r.workload)) > longest]
    ceiling = min(failed, default=FARTHEST)
    low, high = (min(max(rounded(edge(answers)), longest), ceiling) for edge in (min, max))
    estimate = min(max(rounded(answers[0]), low), high)
    if estimate > REACH * longest:
        return None
    return Limit(
        length=estimate,
        low=low,
        high=high,
        memory_bytes=budget,
        longest_measured=longest,
        out_of_memory_at=min(failed, default=None),
    )


def fitting_of(track: Track, names: Mapping[str, Sequence[Record]]) -> Recommendation | None:
    """Return which implementations of a track run out of the device's memory and at which length; None if none does."""
    parts, figures, ids = [], [], []
    grows, said = False, set[str]()
    for name, records in names.items():
        failed = [length(record.workload) for record in records if isinstance(record, OutOfMemory)]
        if (limit := _limit_words(name, records, said)) is not None:
            grows = True
            parts.append(limit[0])
            figures += limit[1]
        elif failed:
            parts.append(f"{name} ran out of memory at {min(failed):,} tokens")
            figures.append(Figure(name=f"{name} ran out of memory at", value=min(failed), unit="tokens"))
        else:
            continue
        ids += [record.workload.id for record in records]
    if not parts:
        return None
    text = f", {track.title}: {listed(parts)}{INSTEAD if grows else ''}"
    return advise_family("memory", track.family, text, ids, figures)


def _limit_words(name: str, records: Sequence[Record], said: set[str]) -> tuple[str, list[Figure]] | None:
    """Return words and figures of a limit, if peaks grow faster than the length; the words leave out a memory that is
    in `said`, and add theirs to it."""
    fit, limit = exponent(memory_points(records)), fits_until(records)
    if fit is None or limit is None or growth(fit.local.exponent) not in ("between", "O(n^2)"):
        return None
    span = f"{limit.low:,}-{limit.high:,}; " if limit.high > limit.low else ""
    known = [record.environment for record in records if record.environment is not None]
    memory = f"{limit.memory_bytes / 1e9:.3g} GB"
    if any(one.framework == "jax" and one.device != "cpu" for one in known):
        memory = f"the {memory} that JAX's allocator may take of the device"
    stops, peak = ("", "") if memory in said else (f" stops fitting {memory}", "peak memory ")
    said.add(memory)
    text = f"{name}{stops} at about {limit.length:,} tokens ({span}{peak}~ n^{fit.local.exponent:.2f})"
    if limit.out_of_memory_at is not None:
        text += f", and ran out at {limit.out_of_memory_at:,}"
    edges = {"low": float(limit.low), "high": float(limit.high)} if limit.high > limit.low else {}
    return text, [
        Figure(name=f"{name} fits until", value=limit.length, unit="tokens", **edges),
        Figure(name=f"exponent of {name}'s peak memory", value=fit.local.exponent),
    ]


def _inputs(records: Sequence[Ok]) -> Model:
    """Return the bytes of the inputs as a straight line through those of the shortest and the longest record."""
    ends = [edge(records, key=lambda record: length(record.workload)) for edge in (min, max)]
    needs = [(length(one.workload), demand(one.workload)) for one in ends]
    (n, a), (m, b) = ((at, need.io_bytes - need.output_bytes) for at, need in needs)
    return lambda x: a + (b - a) * (x - n) / (m - n)


def _polynomial(points: Sequence[MeasuredLength]) -> Model:
    """Return a * n + b * n ** 2 with neither a nor b below 0, by least squares of relative errors."""
    n = np.array([point.length for point in points], float)
    columns = np.stack([n, n**2], axis=1) / np.array([point.value for point in points])[:, None]
    factors = np.linalg.lstsq(columns, np.ones(len(n)), rcond=None)[0]
    for index in (0, 1):
        if factors[index] < 0:
            other = columns[:, 1 - index]
            factors = np.zeros(2)
            factors[1 - index] = other.sum() / (other @ other)
    linear, square = (float(one) for one in factors)
    return lambda x: linear * x + square * x * x


def _power(points: Sequence[MeasuredLength]) -> Model:
    """Return the power law through the two longest lengths."""
    by_length = {point.length: point.value for point in points}
    (n, a), (m, b) = sorted(by_length.items())[-2:]
    slope = np.log(b / a) / np.log(m / n)
    return lambda x: float(b * (x / m) ** slope)


def _slope(points: Sequence[MeasuredLength]) -> Slope:
    from scipy.special import stdtrit

    x = np.log([point.length for point in points])
    away = x - x.mean()
    pull = away / (away @ away)
    y = np.log([point.value for point in points])
    value = float(pull @ y)
    known = [point.theory for point in points if point.theory]
    theory = float(pull @ np.log(known)) if len(known) == len(points) else None
    spreads = [point.spread for point in points if point.spread is not None]
    if len(spreads) < len(points):
        return Slope(value, None, theory)
    residuals, free = y - y.mean() - value * away, len(points) - 2
    sampled = NORMAL * float(np.linalg.norm(pull * np.array(spreads)))
    student = float(stdtrit(free, 0.975)) if free else 0.0
    bent = student * float(np.sqrt(residuals @ residuals / free) * np.linalg.norm(pull)) if free else 0.0
    half = float(np.hypot(sampled, bent))
    return Slope(value, (value - half, value + half), theory)
