"""Time and demand -> rates, by hand-worked numbers."""

from __future__ import annotations

import msgspec
import pytest

from attnbench import masks
from attnbench.measuring.rates import Ceilings, above_roofline, cost_of, implausible, throughput_of
from attnbench.spec import Workload

SQUARE = Workload(batch=2, q_len=512, heads=4, head_dim=64)
FLOPS = 4 * 64 * 512 * 512 * 2 * 4
BYTES = 4 * 2 * 512 * 4 * 64 * 4
DECODE = Workload(batch=1, q_len=1, kv_len=4096, heads=8, head_dim=64, mask=masks.causal())


def test_a_compute_bound_call():
    cost = cost_of(SQUARE, 1e6, Ceilings(flops_per_s=1e12, bytes_per_s=1e11))
    assert (cost.flops, cost.bytes, cost.bound) == (FLOPS, BYTES, "compute")
    assert cost.tflops == pytest.approx(FLOPS / 1e-3 / 1e12)
    assert cost.gb_per_s == pytest.approx(BYTES / 1e-3 / 1e9)
    assert cost.roofline == pytest.approx(FLOPS / 1e12 / 1e-3)
    assert implausible(cost) is None


def test_a_memory_bound_call_and_what_the_cache_excuses():
    ceilings = Ceilings(flops_per_s=1e12, bytes_per_s=1e10)
    cost = cost_of(DECODE, 2e6, ceilings)
    assert cost.bound == "memory"
    assert cost.roofline == pytest.approx(cost.bytes / 1e10 / 2e-3)
    cached = cost_of(DECODE, 2e6, msgspec.structs.replace(ceilings, cache_bytes=1 << 30))
    assert cached.bound == "compute"
    assert cached.roofline < cost.roofline


def test_what_is_faster_than_the_device_is_not_believed():
    ceilings = Ceilings(flops_per_s=1e12, bytes_per_s=1e11)
    limit_ns = FLOPS / 1e12 * 1e9
    assert implausible(cost_of(SQUARE, limit_ns / 1.05, ceilings)) is None
    assert "above the measured compute ceiling" in above_roofline(cost_of(SQUARE, limit_ns / 1.05, ceilings))[0]
    assert above_roofline(cost_of(SQUARE, limit_ns * 1.05, ceilings)) == ()
    reason = implausible(cost_of(SQUARE, limit_ns / 3, ceilings))
    assert reason is not None
    assert "3.00 x the measured compute ceiling" in reason
    memory = implausible(cost_of(DECODE, 1e3, Ceilings(flops_per_s=1e15, bytes_per_s=1e10)))
    assert memory is not None
    assert "memory ceiling" in memory


def test_without_a_time_or_a_ceiling_there_is_a_reason_instead():
    assert cost_of(SQUARE, None, None).reason == "not timed"
    unbounded = cost_of(SQUARE, 1e6, None)
    assert unbounded.roofline is None
    assert "no ceiling" in unbounded.reason
    assert implausible(unbounded) is None


def test_throughput():
    rates = throughput_of(SQUARE, 2e6)
    assert (rates.calls_per_s, rates.samples_per_s, rates.tokens_per_s) == (500, 1000, 512_000)
