from __future__ import annotations

import pytest
from length_factory import GPU, along, out_of_memory

from attnbench.analyse.memory_limit import fits_until
from attnbench.spec import Memory
from attnbench.workloads.cost import demand


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
