"""Exponents of time and memory over length, and the length at which memory runs out."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from length_factory import GPU, LENGTHS, along, out_of_memory, timed
from record_factory import ok, timing

from attnbench.results.growth import (
    MeasuredLength,
    compute_bound,
    exponent,
    fits_until,
    growth,
    memory_points,
    time_points,
)
from attnbench.spec import Cost, Memory
from attnbench.workloads.cost import demand


def points(curve, lengths=LENGTHS, spread=0.01):
    return [MeasuredLength(length=n, value=curve(n), spread=spread, theory=n * n) for n in lengths]


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
    one_round = [MeasuredLength(length=n, value=n, spread=None) for n in LENGTHS]
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


def inputs_per_token(record):
    need = demand(record.workload)
    return (need.io_bytes - need.output_bytes) / record.workload.q_len


LONG = (1024, 4096, 16384)


def test_a_quadratic_path_stops_where_the_sum_says():
    records = along("a", float, LONG, peak=lambda n: 600 * n + 16 * n * n)
    limit = fits_until(records)
    linear = 600 + inputs_per_token(records[0])
    expected = (-linear + (linear**2 + 4 * 16 * 80e9) ** 0.5) / 32
    assert limit.length == pytest.approx(expected, rel=0.02)
    assert limit.length % 1000 == 0
    assert limit.low <= limit.length <= limit.high
    assert limit.memory_bytes == GPU.memory_bytes
    assert limit.longest_measured == 16384
    assert limit.out_of_memory_at is None


def test_nothing_is_said_of_lengths_far_beyond_the_measured():
    records = along("a", float, LONG, peak=lambda n: 600 * n + 16 * n * n)
    assert fits_until(records[:2]) is None
    assert fits_until(along("a", float, peak=lambda n: 600 * n)) is None


def test_nothing_is_said_of_a_path_that_stores_no_scores():
    fused = Memory(peak_bytes=10**9, theory_bytes=0)
    assert fits_until(along("a", float, LONG, memory=fused)) is None


def test_another_memory_may_be_asked_about():
    records = along("a", float, LONG, peak=lambda n: 16 * n * n)
    half, whole = fits_until(records, 40 * 10**9), fits_until(records)
    assert half.length == pytest.approx(whole.length / 2**0.5, rel=0.05)


def test_what_was_seen_bounds_what_is_said():
    quadratic = along("a", float, peak=lambda n: 16 * n * n)
    limit = fits_until([*quadratic, out_of_memory("a", 16384), out_of_memory("a", 8192)])
    assert (limit.high, limit.out_of_memory_at) == (8192, 8192)
    assert limit.length == 8192
    assert fits_until(quadratic, memory_bytes=10**6).low == 4096  # it did fit at 4096, whatever the device says


def test_nothing_is_said_without_two_peaks_or_a_memory():
    records = along("a", float, peak=lambda n: n * n)
    assert fits_until(records[:1]) is None
    assert fits_until(along("a", float)) is None
    assert fits_until(along("a", float, peak=lambda n: n * n, environment=None)) is None
