from __future__ import annotations

import msgspec
import numpy as np
import pytest
from length_factory import LENGTHS, along, out_of_memory, timed
from record_factory import ok, timing

from attnbench.analyse.scaling import Point, compute_bound, exponent, growth, memory_points, time_points
from attnbench.spec import Cost


def points(curve, lengths=LENGTHS, spread=0.01):
    return [Point(length=n, value=curve(n), spread=spread, theory=n * n) for n in lengths]


@pytest.mark.parametrize("power", [0.5, 1.0, 1.7, 2.0])
def test_a_power_law_is_found_exactly(power):
    fit = exponent(points(lambda n: 3.0 * n**power))
    assert fit.overall.exponent == pytest.approx(power)
    assert fit.local.exponent == pytest.approx(power)
    assert fit.overall.theory == pytest.approx(2)
    assert fit.lengths == LENGTHS
    low, high = fit.overall.interval
    assert low < power < high


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = [0, 0]
    for _ in range(300):
        noise = dict(zip(LENGTHS, np.exp(0.02 * rng.standard_normal(len(LENGTHS)))))
        fit = exponent(points(lambda n, noise=noise: n**1.9 * noise[n], spread=0.02))
        for index, slope in enumerate((fit.overall, fit.local)):
            low, high = slope.interval
            hits[index] += low <= 1.9 <= high
    assert min(hits) >= 0.93 * 300
    assert high - low < 0.3


def test_a_fixed_cost_bends_the_line_and_the_long_end_shows_the_growth():
    fit = exponent(points(lambda n: 3e6 + n * n))
    assert fit.overall.exponent < 1.2
    assert 1.4 < fit.local.exponent < 2
    low, high = fit.overall.interval
    assert high - low > 0.5  # five points that lie on no line say little about a slope


def test_two_lengths_give_no_interval_and_no_class():
    fit = exponent(points(lambda n: n**2, lengths=(1000, 4000)))
    assert fit.overall.exponent == pytest.approx(2)
    assert (fit.overall.interval, fit.local.interval) == (None, None)
    assert (fit.growth, fit.growth_in_theory) == (None, None)


def test_two_lengths_that_are_near_give_nothing():
    assert exponent(points(lambda n: n**2, lengths=(816, 968))) is None
    assert exponent(points(lambda n: n**2, lengths=(816, 900, 968))).growth == "O(n^2)"


def test_too_little_is_said_to_be_so():
    assert exponent([]) is None
    assert exponent(points(float, lengths=(512, 512))) is None
    one_round = [Point(length=n, value=n, spread=None) for n in LENGTHS]
    assert exponent(one_round).overall.interval is None
    assert exponent(one_round).overall.theory is None


def test_points_come_from_what_was_measured():
    records = along("a", lambda n: n**1.5, peak=lambda n: 7 * n)
    fit = exponent(time_points([*records, ok("a"), out_of_memory("a", 9999)]))
    assert fit.overall.exponent == pytest.approx(1.5, abs=0.02)
    assert fit.overall.theory == pytest.approx(2)
    assert [(p.length, p.value) for p in memory_points([*records, ok("a")])] == [(n, 7 * n) for n in LENGTHS]


def test_a_record_of_one_round_has_no_spread():
    single = msgspec.structs.replace(timing([5.0]), ci95_ns=None)
    assert time_points([ok("a", time=single)])[0].spread is None


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (lambda n: 1e9 + n, "below O(n)"),
        (lambda n: 512 * n, "O(n)"),
        (lambda n: 512 * n + 0.2 * n * n, "between"),
        (lambda n: 64 * n + 4 * n * n, "O(n^2)"),
    ],
)
def test_memory_is_classed_by_its_long_end(peak, expected):
    fit = exponent(memory_points(along("a", float, peak=peak)))
    assert growth(fit.local.exponent) == expected
    assert growth(fit.local.theory) == expected


def test_no_theory_has_no_class():
    assert growth(None) is None


def bounded(*bounds):
    return [
        msgspec.structs.replace(timed(record), cost=Cost(flops=1, bytes=1, bound=bound))
        for record, bound in zip(along("a", float), bounds)
    ]


def test_where_compute_bound_begins():
    begins = compute_bound(bounded("compute", "memory", "memory", "compute", "compute"))
    assert (begins.begins, begins.length, begins.below) == ("from", 2048, 1024)
    assert compute_bound(bounded(*["compute"] * 5)).begins == "always"
    never = compute_bound(bounded(*["memory"] * 5))
    assert (never.begins, never.length, never.below) == ("never", None, 4096)
    assert compute_bound(along("a", float)) is None
