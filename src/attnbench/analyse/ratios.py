"""How much slower one timed record is than another, with an interval: what rankings and closing sentences stand on.

Implementations of a workload are sampled in interleaved rounds, so rounds are paired: whatever slowed the machine down
in a round slowed both. Records of rounds that were not taken together are compared unpaired, by resampling the rounds
of each: samples of one round are alike, and taking them for independent ones finds differences where there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp

import numpy as np
from msgspec import Struct, structs

from attnbench.measuring.sampling import round_medians
from attnbench.spec import Ok, Record, Time

DRAWS = 2000
SEED = 20240229
FEW_ROUNDS = 6
"""Below this, of rounds or of workloads, a percentile bootstrap is far too narrow; Student's t takes its place."""
LARGEST_LOG = 700.0
"""Nothing larger has an exponential."""


class Ratio(Struct, frozen=True):
    """A ratio of times and its interval."""

    value: float
    low: float
    high: float

    @property
    def inverse(self) -> Ratio:
        """The other way round: seconds of a per second of b."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)


class LogRatio(Struct, frozen=True):
    """Logarithm of a ratio, and draws from its sampling distribution."""

    point: float
    draws: np.ndarray

    def ratio(self, level: float = 0.95) -> Ratio:
        """Back from logarithms, at that confidence."""
        tail = (1 - level) / 2
        low, high = np.clip(np.quantile(self.draws, [tail, 1 - tail]), -LARGEST_LOG, LARGEST_LOG)
        return Ratio(*(float(np.exp(x)) for x in (self.point, min(low, self.point), max(high, self.point))))


def condensed(record: Record) -> Record:
    """The same record with the median of each round for its samples: all that a ratio looks at, found once."""
    if not isinstance(record, Ok) or record.time is None or len(record.time.rounds) == len(record.time.samples_ns):
        return record
    medians = round_medians(record.time)
    if len(medians) < 2:
        return record
    time = structs.replace(record.time, samples_ns=tuple(medians.tolist()), rounds=(1,) * len(medians))
    return structs.replace(record, time=time)


def paired_ratio(a: Ok, b: Ok, level: float = 0.95) -> Ratio:
    """Time of b / time of a."""
    first, second = round_medians(_timed(a)), round_medians(_timed(b))
    shared = min(len(first), len(second)) if _in_turn(a, b) else 0
    if shared < FEW_ROUNDS:
        return log_ratio(a, b).ratio(level)
    return _quick_ratio(np.log(second[:shared]) - np.log(first[:shared]), level)


def log_ratio(a: Ok, b: Ok, seed: int = SEED) -> LogRatio:
    """ln(time of b / time of a). The same seed gives the same draws, so that a table prints the same twice."""
    first, second = _timed(a), _timed(b)
    rounds_a, rounds_b = round_medians(first), round_medians(second)
    # A cell that was tight early left the loop early: the rounds they share are the first ones.
    shared = min(len(rounds_a), len(rounds_b)) if _in_turn(a, b) else 0
    if shared >= 2:
        return _paired(np.log(rounds_b[:shared]) - np.log(rounds_a[:shared]), seed)
    # Samples of one round are alike, so that rounds are what is resampled; without rounds, samples are all there is.
    units = [
        np.log(rounds if len(rounds) else time.samples_ns) for rounds, time in ((rounds_a, first), (rounds_b, second))
    ]
    rng = np.random.default_rng(seed)
    spread_a, spread_b = (_median_draws(values, rng) for values in units)
    return LogRatio(float(np.log(second.median_ns / first.median_ns)), spread_b - spread_a)


def mean_log_ratio(pairs: Sequence[tuple[Ok, Ok]]) -> LogRatio:
    """Geometric mean of ratios b / a over workloads, which are taken as a sample of more.

    From 6 workloads on the draws resample workloads and, within each, rounds. Of 2 to 5 the resampled mean would never
    leave what was seen, so their spread makes a Student's t, or the noise of the rounds where that is larger.
    """
    each = [log_ratio(a, b, SEED + index) for index, (a, b) in enumerate(pairs)]
    points = np.array([one.point for one in each])
    draws = np.stack([one.draws for one in each])
    count, point = len(each), float(points.mean())
    if 1 < count < FEW_ROUNDS:
        error = max(float(points.std(ddof=1)) / count**0.5, float(draws.mean(axis=0).std()))
        return LogRatio(point, point + error * _student_draws(count - 1))
    chosen = np.random.default_rng(SEED).integers(count, size=(count, DRAWS))
    return LogRatio(point, draws[chosen, np.arange(DRAWS)].mean(axis=0))


def _paired(logs: np.ndarray, seed: int) -> LogRatio:
    point = float(np.median(logs))
    if len(logs) >= FEW_ROUNDS:
        ordered, (low, high) = np.sort(logs), _seeded_places(len(logs), seed)
        return LogRatio(point, (ordered[low] + ordered[high]) / 2)
    error = float(logs.std(ddof=1)) / len(logs) ** 0.5
    return LogRatio(point, point + error * np.random.default_rng(seed).standard_t(len(logs) - 1, DRAWS))


def _quick_ratio(logs: np.ndarray, level: float) -> Ratio:
    """What `_paired(logs, SEED).ratio(level)` is: many draws are the same pair of places, and few pairs are soon
    sorted."""
    low, high, counts = _distinct_places(len(logs), SEED)
    ordered = np.sort(logs)
    values = (ordered[low] + ordered[high]) / 2
    order = np.argsort(values)
    ends, values = np.cumsum(counts[order]), values[order]
    point, tail = float(np.median(ordered)), (1 - level) / 2
    edges = [_weighted_quantile(values, ends, share) for share in (tail, 1 - tail)]
    return Ratio(*(exp(x) for x in (point, min(edges[0], point), max(edges[1], point))))


def _weighted_quantile(values: np.ndarray, ends: np.ndarray, share: float) -> float:
    """Of ascending values, each as often as `ends` has grown: interpolated between neighbours as NumPy does."""
    place = share * (DRAWS - 1)
    below = int(place)
    first, second = values[np.searchsorted(ends, [below, min(below + 1, DRAWS - 1)], side="right")]
    return float(first + (second - first) * (place - below))


def _median_draws(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if len(values) == 1:
        # One sample says nothing about its own spread: an interval without end, never a confident one.
        return values[0] + 50 * rng.standard_normal(DRAWS)
    if len(values) < FEW_ROUNDS:
        error = float(values.std(ddof=1)) / len(values) ** 0.5
        return float(np.median(values)) + error * rng.standard_t(len(values) - 1, DRAWS)
    # The median of n resampled values is the sorted value at the median of n uniforms, whose law is a Beta: this gives
    # exactly the percentile bootstrap without drawing n values two thousand times.
    low, high = _median_places(len(values), rng)
    ordered = np.sort(values)
    return (ordered[low] + ordered[high]) / 2


def _median_places(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Where in ascending order the two middle values of each resample stand."""
    half = (count + 1) // 2
    low = rng.beta(half, count - half + 1, DRAWS)
    high = low if count % 2 else low + (1 - low) * rng.beta(1, count - half, DRAWS)
    low_place, high_place = (np.minimum((edge * count).astype(int), count - 1) for edge in (low, high))
    return low_place, high_place


@lru_cache(8)
def _student_draws(freedom: int) -> np.ndarray:
    """Evenly spread over Student's distribution: the tails of plain draws of one or two degrees of freedom are wild."""
    many = np.random.default_rng(SEED).standard_t(freedom, 400 * DRAWS)
    return np.quantile(many, (np.arange(DRAWS) + 0.5) / DRAWS)


@lru_cache(256)
def _seeded_places(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for every pair of records with so many rounds: drawing them is what takes the time."""
    return _median_places(count, np.random.default_rng(seed))


@lru_cache(256)
def _distinct_places(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs of places among those draws, and how often each was drawn."""
    pairs, counts = np.unique(np.stack(_seeded_places(count, seed)), axis=1, return_counts=True)
    return pairs[0], pairs[1], counts


def _in_turn(a: Ok, b: Ok) -> bool:
    """Whether their rounds were taken together."""
    return _timed(a).sitting == _timed(b).sitting


def _timed(record: Ok) -> Time:
    if record.time is None:
        raise ValueError(f"{record.cell.id} was verified but not timed")
    return record.time
