"""Ratios of times with intervals, and the margins that decide whether one time counts as less than another.

Implementations of a workload are sampled in interleaved rounds, so rounds are paired: whatever slowed the machine down
in a round slowed both. Records of rounds that were not taken together are compared unpaired, by resampling the rounds
of each: samples of one round are alike, and taking them for independent ones finds differences that do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, hypot, log

import numpy as np
from msgspec import Struct, structs

from attnbench.comparison import FLOOR
from attnbench.measuring.sampling import round_medians
from attnbench.spec import Ok, Record, Time

RANK_LEVEL = 0.99
"""Confidence of "faster" and "slower". Intervals are printed at 95 %; a table of ten rows asks nine questions."""
LEAST_DIFFERENCE = 1 + FLOOR
"""Least ratio of two times, or of two peaks of memory, that counts as a difference, however narrow its interval."""
LEAST_STEP = 1.02
"""Least step between two levels of a history, and least gain for which another measurement is proposed."""
TIE_LIMIT = 1.05
"""Largest ratio of two times, or of two peaks of memory, at which one implementation may be run for the other."""
ACROSS_RUNS = 1.1
"""Least ratio of times of two runs that counts as a difference: the ratio of one pair in two runs varies by less."""
LARGE_DIFFERENCE = 1.1
"""Ratio that neither chance nor the layout of memory makes: a comparison that finds more need not be repeated."""
CONTENDER = 1.5
"""Times the fastest: an implementation that takes longer will not lead after another measurement."""
EXCELLENT, GOOD = 1.5, 1.2
"""Least low edge of a speed-up's interval that is called excellent, and good."""
TOO_WIDE = 10.0
"""High edge of an interval over its low one: from here on only the side of 1 on which the interval lies is printed."""
SAME_WITHIN, SAME_WIDTH = 0.05, 0.06
"""`same` needs the whole interval of a comparison within this share of 1, and narrower than this."""
LEAST_WAITED = 0.01
"""Share of a time in which threads waited for a core up to which the time is taken as it is: waking up takes a little
on an idle machine too."""
STORED_FLOOR, STORED_SAME = 0.05, 0.10
"""Floor of a comparison of two runs by their anchors, which drift, and the share of 1 within which it is `same`."""

DRAWS = 2000
SEED = 20240229
FEW_ROUNDS = 6
"""Fewest rounds, or workloads, for a percentile bootstrap; over fewer it is far too narrow and Student's t is used."""
LARGEST_LOG = 700.0
"""Largest logarithm with an exponential that a float holds."""


class Ratio(Struct, frozen=True):
    """A ratio of times and its interval."""

    value: float
    low: float
    high: float

    @property
    def inverse(self) -> Ratio:
        """The ratio the other way round."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)

    @property
    def sign(self) -> int:
        """+1 if the whole interval lies more than 1 % above 1, -1 if below, else 0. The ratio is time of b / time of a:
        +1 says that a is significantly faster."""
        return int(self.low > LEAST_DIFFERENCE) - int(self.high < 1 / LEAST_DIFFERENCE)


class LogRatio(Struct, frozen=True):
    """Logarithm of a ratio, and draws from its sampling distribution."""

    point: float
    draws: np.ndarray

    def ratio(self, level: float = 0.95) -> Ratio:
        """Return the ratio with its interval at a confidence."""
        tail = (1 - level) / 2
        low, high = np.clip(np.quantile(self.draws, [tail, 1 - tail]), -LARGEST_LOG, LARGEST_LOG)
        return Ratio(*(float(np.exp(x)) for x in (self.point, min(low, self.point), max(high, self.point))))


def condensed(record: Record) -> Record:
    """Return a record with the median of each round in place of its samples: all that a ratio needs."""
    if not isinstance(record, Ok) or record.time is None or len(record.time.rounds) == len(record.time.samples_ns):
        return record
    medians = round_medians(record.time)
    if len(medians) < 2:
        return record
    time = structs.replace(record.time, samples_ns=tuple(medians.tolist()), rounds=(1,) * len(medians))
    return structs.replace(record, time=time)


def paired_ratio(a: Ok, b: Ok, level: float = 0.95) -> Ratio:
    """Return time of b / time of a at a confidence; the ratio the other way round is its inverse."""
    if _is_turned(a, b):
        return paired_ratio(b, a, level).inverse
    first, second = round_medians(_timed(a)), round_medians(_timed(b))
    shared = min(len(first), len(second)) if _in_turn(a, b) else 0
    if shared < FEW_ROUNDS or _waited(a) or _waited(b):
        return log_ratio(a, b).ratio(level)
    return _quick_ratio(np.log(second[:shared]) - np.log(first[:shared]), level)


def log_ratio(a: Ok, b: Ok, seed: int = SEED) -> LogRatio:
    """Return ln(time of b / time of a). The same seed gives the same draws, so that a table prints the same twice.

    Threads that waited for a core make a time too long by an unknown part of the wait, in all rounds alike. So half of
    the draws take all of a's wait off and half all of b's, the same draws for every pair of two names: what all have in
    common does not average out over workloads.
    """
    if _is_turned(a, b):
        turned = _sampled_ratio(b, a, seed)
        found = LogRatio(-turned.point, -turned.draws)
    else:
        found = _sampled_ratio(a, b, seed)
    if not _waited(a) and not _waited(b):
        return found
    draws, lower = found.draws.copy(), int(a.implementation > b.implementation)
    draws[lower::2] += log(1 - _waited(b))
    draws[1 - lower :: 2] -= log(1 - _waited(a))
    return LogRatio(found.point, draws)


def _is_turned(a: Ok, b: Ok) -> bool:
    """Return whether the ratio is computed the other way round, so that both ways have one interval."""
    first, second = _timed(a), _timed(b)
    return (first.median_ns, first.samples_ns) > (second.median_ns, second.samples_ns)


def _waited(record: Ok) -> float:
    """Return the share of a time by which it may be too long, since threads waited for a core."""
    share = _timed(record).waited or 0.0
    return share if share > LEAST_WAITED else 0.0


def _sampled_ratio(a: Ok, b: Ok, seed: int) -> LogRatio:
    """Return the logarithm of the ratio with the noise of its samples."""
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
    """Return the geometric mean of the ratios b / a over workloads, which are taken as a sample of more. From 6
    workloads on the draws resample workloads and, within each, rounds. Of 2 to 5 the resampled mean would never leave
    what was seen, so their spread makes a Student's t, or the noise of the rounds if that is larger."""
    each = [log_ratio(a, b, SEED + index) for index, (a, b) in enumerate(pairs)]
    points = np.array([one.point for one in each])
    draws = np.stack([one.draws for one in each])
    count, point = len(each), float(points.mean())
    if 1 < count < FEW_ROUNDS:
        error = max(float(points.std(ddof=1)) / count**0.5, float(draws.mean(axis=0).std()))
        return LogRatio(point, point + error * _student_draws(count - 1))
    chosen = np.random.default_rng(SEED).integers(count, size=(count, DRAWS))
    return LogRatio(point, draws[chosen, np.arange(DRAWS)].mean(axis=0))


def combine(ratios: Sequence[Ratio], weights: Sequence[float]) -> Ratio:
    """Return the product of independent ratios, each to the power of its weight, at the confidence of the intervals.
    The distances from value to bound add up as standard errors do, each side by itself (Zou and Donner's MOVER). Only
    the intervals need to be known, and skew ones stay skew."""
    middle = sum(weight * log(ratio.value) for ratio, weight in zip(ratios, weights))
    below, above = [], []
    for ratio, weight in zip(ratios, weights):
        down, up = weight * log(ratio.value / ratio.low), weight * log(ratio.high / ratio.value)
        below.append(down if weight > 0 else up)
        above.append(up if weight > 0 else down)
    return Ratio(exp(middle), exp(middle - hypot(*below)), exp(middle + hypot(*above)))


def geometric_mean(ratios: Sequence[Ratio]) -> Ratio:
    """Return the geometric mean of these ratios and no others: they are not taken as a sample of more."""
    return combine(ratios, [1 / len(ratios)] * len(ratios))


def _paired(logs: np.ndarray, seed: int) -> LogRatio:
    point = float(np.median(logs))
    if len(logs) >= FEW_ROUNDS:
        ordered, (low, high) = np.sort(logs), _seeded_places(len(logs), seed)
        return LogRatio(point, (ordered[low] + ordered[high]) / 2)
    error = float(logs.std(ddof=1)) / len(logs) ** 0.5
    return LogRatio(point, point + error * np.random.default_rng(seed).standard_t(len(logs) - 1, DRAWS))


def _quick_ratio(logs: np.ndarray, level: float) -> Ratio:
    """Return the same as `_paired(logs, SEED).ratio(level)`, sooner. Many draws are the same pair of places, and few
    pairs are soon sorted."""
    low, high, counts = _distinct_places(len(logs), SEED)
    ordered = np.sort(logs)
    values = (ordered[low] + ordered[high]) / 2
    order = np.argsort(values)
    ends, values = np.cumsum(counts[order]), values[order]
    point, tail = float(np.median(ordered)), (1 - level) / 2
    edges = [_weighted_quantile(values, ends, share) for share in (tail, 1 - tail)]
    return Ratio(*(exp(x) for x in (point, min(edges[0], point), max(edges[1], point))))


def _weighted_quantile(values: np.ndarray, ends: np.ndarray, share: float) -> float:
    """Return a quantile of ascending values, each as often as `ends` has grown, interpolated as NumPy does."""
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
    """Return the places, in ascending order, of the two middle values of each resample."""
    half = (count + 1) // 2
    low = rng.beta(half, count - half + 1, DRAWS)
    high = low if count % 2 else low + (1 - low) * rng.beta(1, count - half, DRAWS)
    low_place, high_place = (np.minimum((edge * count).astype(int), count - 1) for edge in (low, high))
    return low_place, high_place


@lru_cache(8)
def _student_draws(freedom: int) -> np.ndarray:
    """Return quantiles of Student's t at evenly spaced shares; random draws have wild tails at few degrees."""
    from scipy.special import stdtrit

    return stdtrit(freedom, (np.arange(DRAWS) + 0.5) / DRAWS)


@lru_cache(256)
def _seeded_places(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places for a number of rounds, drawn once: drawing them is what takes the time."""
    return _median_places(count, np.random.default_rng(seed))


@lru_cache(256)
def _distinct_places(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct pairs of places among the draws, and how often each was drawn."""
    pairs, counts = np.unique(np.stack(_seeded_places(count, seed)), axis=1, return_counts=True)
    return pairs[0], pairs[1], counts


def _in_turn(a: Ok, b: Ok) -> bool:
    """Return whether the rounds of two records were taken together."""
    return _timed(a).sitting == _timed(b).sitting


def _timed(record: Ok) -> Time:
    if record.time is None:
        raise ValueError(f"{record.cell.id} was verified but not timed")
    return record.time
