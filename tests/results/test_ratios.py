"""Ratios of times and their intervals: paired, unpaired, over workloads, and on a busy machine."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from record_factory import noisy, ok, timing

from attnbench.results.ratios import (
    RANK_LEVEL,
    Ratio,
    combine,
    geometric_mean,
    log_ratio,
    mean_log_ratio,
    paired_ratio,
    round_medians,
)


def test_pairing_removes_a_common_drift():
    ratio = paired_ratio(ok("a", noisy(1e6, 1)), ok("b", noisy(1.1e6, 2)))
    assert ratio.low < 1.1 < ratio.high
    assert ratio.high / ratio.low < 1.02  # the drift itself is +-20 %


def test_unpaired_when_rounds_do_not_match():
    a = ok("a", time=timing(noisy(1e6, 1), rounds=()))
    b = ok("b", time=timing(noisy(1.1e6, 2), rounds=()))
    ratio = paired_ratio(a, b)
    assert ratio.high / ratio.low > 1.05
    assert ratio.low < 1.1 < ratio.high


def test_same_answer_twice_and_mirrored():
    a, b = ok("a", noisy(1e6, 1)), ok("b", noisy(1.3e6, 2))
    assert paired_ratio(a, b) == paired_ratio(a, b)


@pytest.mark.parametrize("rounds", [3, 6, 8, 9, 12, 25])
@pytest.mark.parametrize("waited", [None, 0.3])
def test_both_ways_round_have_one_interval(rounds: int, waited: float | None):
    for seed in range(10):
        a, b = (
            busy(name, noisy(time, seed + add, 0.02, rounds), waited)
            for name, time, add in (("a", 1e6, 0), ("b", 1.015e6, 99))
        )
        for level in (0.95, RANK_LEVEL):
            there, back = paired_ratio(a, b, level), paired_ratio(b, a, level).inverse
            assert (there.value, there.low, there.high) == pytest.approx((back.value, back.low, back.high), rel=1e-12)
            assert there.sign == back.sign
        there, back = mean_log_ratio([(a, b)] * 7).ratio(), mean_log_ratio([(b, a)] * 7).ratio().inverse
        assert (there.low, there.high) == pytest.approx((back.low, back.high), rel=1e-12)


@pytest.mark.parametrize("rounds", [6, 7, 8, 25, 160])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_the_quick_way_gives_what_the_draws_give(rounds: int, level: float):
    for seed in range(5):
        a, b = ok("a", noisy(1e6, seed, 0.05, rounds)), ok("b", noisy(1.1e6, seed + 9, 0.05, rounds))
        drawn, quick = log_ratio(a, b).ratio(level), paired_ratio(a, b, level)
        assert (quick.value, quick.low, quick.high) == pytest.approx((drawn.value, drawn.low, drawn.high), rel=1e-12)


def test_round_medians_of_equal_and_of_unequal_rounds_agree():
    samples = np.random.default_rng(1).normal(size=24)
    equal = round_medians(timing(samples, rounds=(8, 8, 8)))
    assert list(equal) == [np.median(part) for part in np.split(samples, 3)]


def test_round_medians_split_the_samples():
    time = timing([1, 2, 3, 10, 20], rounds=(3, 2))
    assert list(round_medians(time)) == [2, 15]
    assert len(round_medians(timing([1, 2, 3], rounds=(2, 2)))) == 0


def test_interval_covers_the_truth_as_often_as_it_says():
    hits = 0
    for seed in range(120):
        ratio = paired_ratio(ok("a", noisy(1e6, 2 * seed, 0.03, 25)), ok("b", noisy(1.05e6, 2 * seed + 1, 0.03, 25)))
        hits += ratio.low <= 1.05 <= ratio.high
    assert hits >= 0.88 * 120


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_few_rounds_give_wide_intervals(rounds: int):
    hits = 0
    for seed in range(100):
        a, b = (ok("x", noisy(1e6, 1000 + 2 * seed + i, 0.03, rounds)) for i in (0, 1))
        ratio = paired_ratio(a, b)
        hits += ratio.low <= 1 <= ratio.high
    assert hits >= 88


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6, 8, 12, 25, 50])
@pytest.mark.parametrize("sd_of_rounds", [0.05, 0.15])
def test_two_halves_of_one_stable_cell_are_not_told_apart(rounds: int, sd_of_rounds: float):
    """A round is slow or fast as a whole: its ten samples are not ten measurements. 1 % at most, by a level of 99 %."""
    rng, told_apart, tries = np.random.default_rng(rounds), 0, 200
    for _ in range(tries):
        halves = []
        for sitting in ("x", "x+1"):
            logs = sd_of_rounds * rng.standard_normal((rounds, 1)) + 0.02 * rng.standard_normal((rounds, 10))
            time = timing(1e6 * np.exp(logs).ravel(), rounds=(10,) * rounds, sitting=sitting)
            halves.append(ok("x", time=time))
        told_apart += paired_ratio(*halves, RANK_LEVEL).sign != 0
    assert told_apart <= 0.01 * tries + 2


@pytest.mark.parametrize("rounds", [3, 6, 25])
def test_cells_measured_apart_are_still_told_apart_if_they_differ(rounds: int):
    a = ok("a", time=timing(noisy(1e6, 1, 0.01, rounds), sitting="x"))
    b = ok("b", time=timing(noisy(3e6, 2, 0.01, rounds), sitting="x+1"))
    assert paired_ratio(a, b, RANK_LEVEL).sign == 1
    assert paired_ratio(b, a, RANK_LEVEL).sign == -1


def test_one_round_of_many_samples_is_never_certain():
    a, b = (
        ok(name, time=timing(np.random.default_rng(seed).normal(ns, 1e3, 40), rounds=(40,), sitting=sitting))
        for name, seed, ns, sitting in (("a", 1, 1e6, "x"), ("b", 2, 2e6, "y"))
    )
    assert paired_ratio(a, b, RANK_LEVEL).sign == 0


def test_one_sample_is_never_certain():
    ratio = paired_ratio(ok("a", [1e6]), ok("b", [5e6]))
    assert ratio.low < 1 < ratio.high
    assert ratio.value == pytest.approx(5)


def test_thousands_of_samples_are_no_burden():
    samples = np.random.default_rng(0).normal(1e6, 1e4, 20_000)
    assert paired_ratio(ok("a", samples), ok("b", samples * 1.5)).value == pytest.approx(1.5)


def test_geometric_mean_over_workloads():
    pairs = [(ok("a", noisy(1e6, i)), ok("b", noisy(factor * 1e6, 50 + i))) for i, factor in enumerate((2, 4, 8))]
    ratio = mean_log_ratio(pairs).ratio()
    assert ratio.value == pytest.approx(4, rel=0.02)
    assert ratio.low < 3 < 5 < ratio.high  # three shapes that disagree


@pytest.mark.parametrize("count", [6, 7, 20, 21])
def test_draws_are_those_of_a_bootstrap(count: int):
    """Against resampling by hand, which the closed form replaces."""
    rng = np.random.default_rng(count)
    logs = rng.standard_normal(count)
    by_hand = np.median(logs[rng.integers(count, size=(40_000, count))], axis=1)
    drawn = log_ratio(ok("a", np.ones(count)), ok("b", np.exp(logs))).draws
    grid = np.linspace(-2.5, 2.5, 101)
    shares = [np.mean(draws[:, None] <= grid, axis=0) for draws in (by_hand, drawn)]
    assert np.abs(shares[0] - shares[1]).max() < 0.05  # 2,000 draws: Kolmogorov-Smirnov at far beyond 99.9 %


def test_untimed_record_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="not timed"):
        paired_ratio(ok("a"), ok("b", [1.0]))


def test_inverse_swaps_the_bounds():
    assert Ratio(2, 1, 4).inverse == Ratio(0.5, 0.25, 1)


def test_one_ratio_is_its_own_mean():
    ratio = geometric_mean([Ratio(1.1, 1.05, 1.2)])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.05, 1.2))


def test_mean_of_many_is_tighter_by_the_root_of_their_number():
    one = Ratio(2.0, 2 * exp(-0.04), 2 * exp(0.08))
    mean = geometric_mean([one] * 4)
    assert mean.value == pytest.approx(2)
    assert log(mean.value / mean.low) == pytest.approx(0.02)
    assert log(mean.high / mean.value) == pytest.approx(0.04)


def test_a_divisor_lends_its_upper_bound_to_the_lower():
    certain, skew = Ratio(3.0, 3.0, 3.0), Ratio(2.0, 1.9, 2.5)
    quotient = combine([certain, skew], [1, -1])
    assert (quotient.value, quotient.low, quotient.high) == pytest.approx((1.5, 3 / 2.5, 3 / 1.9))


def test_interval_of_a_quotient_covers_as_often_as_its_parts():
    rng, sds, hits = np.random.default_rng(0), (0.01, 0.03), 0
    for _ in range(1000):
        parts = [Ratio(exp(m), exp(m - 1.645 * sd), exp(m + 1.645 * sd)) for sd in sds for m in [rng.normal(0, sd)]]
        both = combine(parts, [1, -1])
        hits += both.low <= 1 <= both.high
    assert 870 <= hits <= 930


def busy(name: str, samples: np.ndarray, waited: float | None):
    return ok(name, time=timing(samples, rounds=(1,) * len(samples), waited=waited))


def test_a_time_with_waits_may_be_as_much_shorter():
    """Slower in every round, but its threads waited for cores 80 % of the time: without that it may be faster."""
    fast, slow = busy("a", noisy(1e6, 1), None), busy("b", noisy(3e6, 2), 0.8)
    ratio = paired_ratio(fast, slow)
    assert ratio.value == pytest.approx(3, rel=0.02)
    assert ratio.low == pytest.approx(0.6, rel=0.02)
    assert ratio.high == pytest.approx(3, rel=0.02)
    assert ratio.sign == 0
    back = paired_ratio(slow, fast)
    assert (back.low, back.high) == pytest.approx((1 / ratio.high, 1 / ratio.low), rel=0.01)
    assert paired_ratio(fast, busy("b", noisy(3e6, 2), 0.5)).sign > 0, "1.5 times as slow at least"


def test_the_winner_is_as_sure_if_only_it_has_waited():
    waited = paired_ratio(busy("a", noisy(1e6, 1), 0.9), busy("b", noisy(2e6, 2), None))
    assert waited.low == pytest.approx(2, rel=0.02)
    assert waited.high == pytest.approx(20, rel=0.02)


@pytest.mark.parametrize("share", [None, 0.0, 0.005])
def test_waking_up_is_no_wait(share):
    a, b = noisy(1e6, 1), noisy(1.1e6, 2)
    assert paired_ratio(busy("a", a, share), busy("b", b, share)) == paired_ratio(ok("a", a), ok("b", b))


def test_waits_do_not_average_out_over_workloads():
    pairs = [(busy("a", noisy(1e6, n), None), busy("b", noisy(3e6, n + 50), 0.8)) for n in range(12)]
    ratio = mean_log_ratio(pairs).ratio()
    assert ratio.low == pytest.approx(0.6, rel=0.05)
    assert ratio.high == pytest.approx(3, rel=0.05)
