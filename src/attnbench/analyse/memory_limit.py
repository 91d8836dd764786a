"""The length at which a path stops fitting a memory, from how its measured peaks grow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from attnbench.analyse.advice import rounded
from attnbench.analyse.families import length
from attnbench.analyse.flash import stores_scores
from attnbench.analyse.scaling import Point, memory_points
from attnbench.spec import Ok, OutOfMemory, Record
from attnbench.workloads.cost import demand

FARTHEST = 1 << 32
REACH = 8
"""Times the longest measured length: beyond it nobody knows how a path grows."""
Model = Callable[[int], float]
"""Length -> bytes."""


class Limit(Struct, frozen=True, kw_only=True):
    """One call and its inputs fit up to about this length on an otherwise empty device; what was worked out has two
    digits."""

    length: int
    low: int
    high: int
    """Between what two models of growth say, and what was seen to fit and not to fit."""
    memory_bytes: int
    longest_measured: int
    out_of_memory_at: int | None = None
    """Shortest length that ran out of memory."""


def fits_until(records: Sequence[Record], memory_bytes: int | None = None) -> Limit | None:
    """Limit of one implementation along a track; by default of the memory of the device it ran on.

    None where fewer than two peaks were measured, the memory is not known, the scores are not stored (such a path grows
    with its inputs) or the limit is too far beyond what was measured.
    """
    measured = [r for r in records if isinstance(r, Ok) and r.memory.peak_bytes]
    points = memory_points(measured)
    budget = memory_bytes or _device_memory(measured)
    if budget is None or len({point.length for point in points}) < 2 or not all(map(stores_scores, measured)):
        return None
    inputs = _inputs(measured)
    answers = [_solve(model, inputs, budget) for model in (_polynomial(points), _power(points))]
    longest = max(point.length for point in points)
    failed = [n for r in records if isinstance(r, OutOfMemory) and (n := length(r.workload)) > longest]
    ceiling = min(failed, default=FARTHEST)
    low, high = (min(max(rounded(edge(answers)), longest), ceiling) for edge in (min, max))
    found = min(max(rounded(answers[0]), low), high)
    if found > REACH * longest:
        return None
    return Limit(
        length=found,
        low=low,
        high=high,
        memory_bytes=budget,
        longest_measured=longest,
        out_of_memory_at=min(failed, default=None),
    )


def _device_memory(records: Sequence[Ok]) -> int | None:
    known = [r.environment.memory_bytes for r in records if r.environment is not None]
    return known[-1] if known else None


def _inputs(records: Sequence[Ok]) -> Model:
    """Bytes of the arrays that are handed in: a straight line through those of the shortest and the longest."""
    first, last = (min(records, key=_length), max(records, key=_length))
    (n, a), (m, b) = ((_length(r), _input_bytes(r)) for r in (first, last))
    return lambda x: a + (b - a) * (x - n) / (m - n)


def _length(record: Ok) -> int:
    return length(record.workload)


def _input_bytes(record: Ok) -> int:
    need = demand(record.workload)
    return need.io_bytes - need.output_bytes


def _polynomial(points: Sequence[Point]) -> Model:
    """a * n + b * n ** 2 with neither below 0, least squares of relative errors."""
    n = np.array([point.length for point in points], float)
    columns = np.stack([n, n**2], axis=1) / np.array([point.value for point in points])[:, None]
    found = np.linalg.lstsq(columns, np.ones(len(n)), rcond=None)[0]
    for index in (0, 1):
        if found[index] < 0:
            other = columns[:, 1 - index]
            found = np.zeros(2)
            found[1 - index] = other.sum() / (other @ other)
    linear, square = (float(one) for one in found)
    return lambda x: linear * x + square * x * x


def _power(points: Sequence[Point]) -> Model:
    """The power law through the two longest."""
    by_length = {point.length: point.value for point in points}
    (n, a), (m, b) = sorted(by_length.items())[-2:]
    slope = np.log(b / a) / np.log(m / n)
    return lambda x: float(b * (x / m) ** slope)


def _solve(peak: Model, inputs: Model, budget: int) -> int:
    """Longest length whose peak and inputs fit."""
    return bisect_right(range(1, FARTHEST), budget, key=lambda n: peak(n) + inputs(n))
