"""The length from which one implementation is faster than another, with an interval."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from msgspec import Struct

from attnbench.analyse.families import length
from attnbench.results.ratios import RANK_LEVEL, SEED, LogRatio, Ratio, log_ratio
from attnbench.results.records import is_timed
from attnbench.spec import Ok, Record

Kind = Literal["always", "never", "from", "until", "same", "mixed"]
"""Of a against b, at the measured lengths: faster at all that differ, at none, from a length on, up to a length, no
difference anywhere, or to and fro."""
NARROW = 2.0
"""Measured lengths that are at most so many times apart tell where between them a line through both may be read."""


class Crossover(Struct, frozen=True, kw_only=True):
    """Where a and b change places."""

    kind: Kind
    length: float | None = None
    """Where both take as long, interpolated in logarithms; for `from` and `until` only. Tell `point` instead."""
    interval: tuple[float, float] | None = None
    """The nearest measured lengths around what the rounds say at 95 %: between two of them anything may happen."""
    lengths: tuple[int, ...]
    """At which both were timed."""
    ratios: tuple[Ratio, ...]
    """Time of b / time of a at each."""
    signs: tuple[int, ...]
    """At each, +1 where a is faster for certain, -1 where b is, 0 where neither can be told."""

    @property
    def point(self) -> float | None:
        """The length, where what was measured around it is near enough to interpolate."""
        if self.length is None or self.interval is None or self.interval[1] > NARROW * self.interval[0]:
            return None
        return self.length


def crossover(a_records: Sequence[Record], b_records: Sequence[Record]) -> Crossover | None:
    """Of two implementations along one track; None where no length has both."""
    ours, theirs = _timed(a_records), _timed(b_records)
    lengths = sorted(ours.keys() & theirs.keys())
    if not lengths:
        return None
    logs = [log_ratio(ours[n], theirs[n], SEED + index) for index, n in enumerate(lengths)]
    signs = tuple(one.ratio(RANK_LEVEL).sign for one in logs)
    found = {"lengths": tuple(lengths), "ratios": tuple(one.ratio() for one in logs), "signs": signs}
    certain = [index for index, one in enumerate(signs) if one]
    turns = [(i, j) for i, j in pairwise(certain) if signs[i] != signs[j]]
    if not certain:
        return Crossover(kind="same", **found)
    if not turns:
        return Crossover(kind="always" if signs[certain[0]] > 0 else "never", **found)
    if len(turns) > 1:
        return Crossover(kind="mixed", **found)
    first, last = turns[0]
    where, interval = _place(lengths[first : last + 1], logs[first : last + 1], signs[last])
    return Crossover(kind="from" if signs[last] > 0 else "until", length=where, interval=interval, **found)


def _timed(records: Sequence[Record]) -> dict[int, Ok]:
    return {length(record.workload): record for record in records if is_timed(record)}


def _place(lengths: Sequence[int], logs: Sequence[LogRatio], side: int) -> tuple[float, tuple[float, float]]:
    """Where the ratio passes 1 between two lengths of certain and opposite sign, and the measured ones around it."""
    x = np.log(lengths)
    points = side * np.array([[one.point] for one in logs])
    draws = side * np.stack([one.draws for one in logs])
    where = float(np.exp(_last_zero(x, points)[0]))
    low, high = (float(np.exp(edge)) for edge in np.quantile(_last_zero(x, draws), [0.025, 0.975]))
    below = max(0, bisect_right(lengths, min(low, where)) - 1)
    above = min(len(lengths) - 1, bisect_left(lengths, max(high, where)))
    if below == above:
        below, above = max(0, below - 1), min(len(lengths) - 1, above + 1)
    return where, (float(lengths[below]), float(lengths[above]))


def _last_zero(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Per column, where the line through the points last rises above 0; the first or last x where it never does."""
    rises = (values[:-1] <= 0) & (values[1:] > 0)
    index = len(rises) - 1 - np.argmax(rises[::-1], axis=0)
    columns = np.arange(values.shape[1])
    before, after = values[index, columns], values[index + 1, columns]
    share = np.where(after > before, -before / np.where(after > before, after - before, 1), 0.0)
    inside = x[index] + share * (x[index + 1] - x[index])
    return np.where(rises.any(axis=0), inside, np.where(values[0] > 0, x[0], x[-1]))
