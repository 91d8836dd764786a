"""Sampling: the summary of samples as a Time, the stop rule, and the loop that interleaves cells. Pure arithmetic."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb, exp
from typing import Protocol

import numpy as np

from attnbench.spec import Time

ESTIMATOR = 2
"""Version of the estimate of a published time: what a clock counts, warm-up, visits, summaries. Times of two versions
are not compared."""
VISIT_NS = 10e6
"""Time for which one implementation is sampled before the next has its turn."""
SLOW_VISIT_NS, MOST_BY_SLOW_CLOCK, FEWEST_BY_SLOW_CLOCK = 50e6, 20, 3
"""Length of a visit by a profiler, which costs about as much as these calls, and its fewest and most calls."""
SHORTEST_SAMPLE_NS = 50e3
"""Length below which several calls make one sample: the clock and the wait around a call cost about a microsecond."""
MIN_ROUNDS = 8
"""Fewest rounds; with fewer, one function under two names may seem to differ."""
FEW = 6
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t by number of values."""
FEW_ROUNDS = 3
"""Fewest rounds of a cell so slow that it has used three times its budget."""
MOST_SAMPLES_PER_VISIT = 50
VARIED = 0.3
"""Share by which visits are longer or shorter at random, so that a kernel cannot know which call is the last."""


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the confidence interval of the median of independent values; None for a single value.

    From 6 values on it consists of order statistics, which assume nothing about the noise. For 2 to 5 values, of which
    no order statistic reaches 95 %, it is Student's t of the logarithms.
    """
    ordered, n = sorted(values), len(values)
    if n < 2:
        return None
    if n < FEW:
        middle, half = float(np.median(ordered)), STUDENT[n] * float(np.std(np.log(ordered), ddof=1)) / n**0.5
        return middle / exp(half), middle * exp(half)
    tail, rank = 0.0, 0
    while rank < n // 2 and tail + comb(n, rank) / 2**n <= (1 - confidence) / 2:
        tail += comb(n, rank) / 2**n
        rank += 1
    return ordered[rank - 1], ordered[n - rank]


def summarise(rounds: Sequence[Sequence[float]], clock: str, calls_per_sample: int) -> Time:
    """Return the Time of the samples of all rounds; its interval is that of the rounds' medians."""
    samples = np.array([sample for visit in rounds for sample in visit])
    q1, q3 = np.percentile(samples, [25, 75])
    fence = 1.5 * (q3 - q1)
    p50, p95, p99 = np.percentile(samples, [50, 95, 99])
    median = float(p50)
    interval = median_interval([float(np.median(visit)) for visit in rounds if len(visit)])
    return Time(
        samples_ns=tuple(round(float(sample), 1) for sample in samples),
        median_ns=median,
        ci95_ns=None if interval is None else (min(median, interval[0]), max(median, interval[1])),
        min_ns=float(samples.min()),
        max_ns=float(samples.max()),
        p50_ns=float(p50),
        p95_ns=float(p95),
        p99_ns=float(p99),
        mean_ns=float(samples.mean()),
        std_ns=float(samples.std(ddof=1)) if len(samples) > 1 else 0.0,
        outliers=int(np.count_nonzero((samples < q1 - fence) | (samples > q3 + fence))),
        clock=clock,
        calls_per_sample=calls_per_sample,
        rounds=tuple(len(visit) for visit in rounds),
    )


def round_medians(time: Time) -> np.ndarray:
    """Return the median of each interleaving round, in order; empty if the samples do not come in rounds."""
    if not time.rounds or sum(time.rounds) != len(time.samples_ns):
        return np.empty(0)
    samples = np.asarray(time.samples_ns)
    if len(time.rounds) == len(samples):
        return samples
    if len(set(time.rounds)) == 1:
        return np.median(samples.reshape(len(time.rounds), -1), axis=1)
    parts = np.split(samples, np.cumsum(time.rounds)[:-1])
    return np.array([np.median(part) for part in parts if len(part)])


class Dropped(Exception):
    """A source that cannot be sampled any more; the others go on."""


class Source(Protocol):
    """A cell in a worker or an anchor, which can be sampled."""

    @property
    def call_ns(self) -> float:
        """Time of one call, estimated in the warm-up."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts sampled at each visit: "main", and for a train pass "forward" and "backward"."""
        ...

    @property
    def slow_clock(self) -> bool:
        """Whether each visit has a large fixed cost (a profiler), so that fewer and fuller visits pay."""
        ...

    def sample(self, part: str, count: int, calls: int) -> list[float]:
        """Return nanoseconds per call of each sample."""
        ...


@dataclass
class Series:
    """Samples of one source."""

    source: Source
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    calls: int = 1
    count: int = 1
    spent_s: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        call = max(self.source.call_ns, 1.0)
        self.calls = 1 if self.source.slow_clock else max(1, round(SHORTEST_SAMPLE_NS / call))
        per_visit = int(VISIT_NS / (call * self.calls))
        if self.source.slow_clock:
            per_visit = min(max(int(SLOW_VISIT_NS / call), FEWEST_BY_SLOW_CLOCK), MOST_BY_SLOW_CLOCK)
        self.count = min(max(1, per_visit), MOST_SAMPLES_PER_VISIT)

    def visit(self, count: int) -> None:
        """Sample every part once."""
        start = time.perf_counter()
        for part in self.source.parts:
            self.rounds.setdefault(part, []).append(self.source.sample(part, count, self.calls))
        self.spent_s += time.perf_counter() - start

    def tight(self, precision: float) -> bool:
        """Return whether the 95 % interval of the median is within +-precision of it."""
        rounds = self.rounds["main"]
        if len(rounds) < MIN_ROUNDS:
            return False
        medians = [float(np.median(visit)) for visit in rounds]
        interval = median_interval(medians)
        return interval is not None and (interval[1] - interval[0]) / 2 <= precision * float(np.median(medians))


@dataclass(frozen=True)
class StopRule:
    """The rule for when a source has enough samples."""

    budget_s: float
    precision: float
    trials: int | None = None

    def enough(self, series: Series) -> bool:
        """Return whether the number of samples, the precision or the budget is reached, never before a few rounds."""
        rounds = series.rounds.get("main", [])
        if self.trials is not None:
            return sum(len(visit) for visit in rounds) >= self.trials
        least = MIN_ROUNDS if series.spent_s < 3 * self.budget_s else FEW_ROUNDS
        if len(rounds) < least:
            return False
        return series.spent_s >= self.budget_s or series.tight(self.precision)


def varied(count: int, rng: random.Random) -> int:
    """Draw a number near this one, at least 1."""
    return max(1, round(count * rng.uniform(1 - VARIED, 1 + VARIED)))


def interleave(
    sources: Sequence[Source],
    rule: StopRule,
    rng: random.Random,
    always: Sequence[Source] = (),
) -> list[Series]:
    """Visit all sources in a fresh random order each round until each has enough samples; `always` join each round.

    Visits of a source differ in length at random.
    """
    series = [Series(source) for source in sources]
    companions = [Series(source) for source in always]
    while any(not one.done for one in series):
        waiting = [one for one in series if not one.done] + companions
        rng.shuffle(waiting)
        for one in waiting:
            try:
                fixed = rule.trials is not None and one not in companions
                one.visit(1 if fixed else varied(one.count, rng))
                one.done = rule.enough(one)
            except Dropped:
                one.done = True
    return series + companions
