"""Bencher Metric Format (`bencher run --adapter json --file FILE`): latency in ns, throughput in calls/s, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnbench.results.exports.table import Source
from attnbench.results.exports.timed import Timed, timed


def bencher(sources: Sequence[Source]) -> dict[str, Any]:
    """Benchmark -> measure -> value with its bounds."""
    return {one.name: _measures(one) for one in timed(sources)}


def _measures(one: Timed) -> dict[str, dict[str, float]]:
    latency = {"value": one.time.median_ns}
    throughput = {"value": 1e9 / one.time.median_ns}
    low, high = one.time.ci95_ns or (None, None)
    if low is not None and high is not None:
        latency |= {"lower_value": max(low, 0.0), "upper_value": high}
        throughput["lower_value"] = 1e9 / high
        if low > 0:
            throughput["upper_value"] = 1e9 / low
    measures = {"latency": latency, "throughput": throughput}
    if one.record.memory.peak_bytes is not None:
        measures["peak-memory"] = {"value": float(one.record.memory.peak_bytes)}
    return measures
