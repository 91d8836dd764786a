"""pytest-benchmark's JSON, for `pytest-benchmark compare FILE...`: seconds, one group per workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnbench.results.exports.table import Source
from attnbench.results.exports.timed import Timed, facts, printable, timed
from attnbench.spec import DIRTY, Environment

VERSION = "5.3.1"
"""Of pytest-benchmark, whose form this is."""


def pytest_benchmark(sources: Sequence[Source]) -> dict[str, Any]:
    """The document that `--benchmark-json` would have written."""
    cells = timed(sources)
    first = cells[0] if cells else None
    environment = None if first is None else first.record.environment
    return {
        "machine_info": _machine(environment),
        "commit_info": {
            "id": "" if environment is None else environment.commit.removesuffix(DIRTY),
            "dirty": environment is not None and environment.is_dirty,
        },
        "benchmarks": [_benchmark(one) for one in cells],
        "datetime": "" if first is None else first.header.created,
        "version": VERSION,
    }


def _machine(environment: Environment | None) -> dict[str, Any]:
    if environment is None:
        return {}
    return {
        "node": environment.device_name,
        "machine": environment.device,
        "processor": environment.cpu,
        "system": environment.system,
        "python_version": environment.python,
        "cpu": {"brand_raw": environment.cpu, "count": environment.cores},
    }


def _benchmark(one: Timed) -> dict[str, Any]:
    record = one.record
    return {
        "group": printable(record.workload.id),
        "name": one.name,
        "fullname": one.name,
        "params": None,
        "param": None,
        "extra_info": facts(one),
        "options": {
            "disable_gc": False,
            "timer": one.time.clock,
            "min_rounds": 1,
            "max_time": 0.0,
            "min_time": 0.0,
            "warmup": True,
        },
        "stats": _stats(np.asarray(one.time.samples_ns) * 1e-9, one.time.calls_per_sample),
    }


def _stats(data: np.ndarray, iterations: int) -> dict[str, Any]:
    q1, median, q3 = (float(value) for value in np.percentile(data, [25, 50, 75]))
    fence, mean, spread = 1.5 * (q3 - q1), float(data.mean()), float(data.std(ddof=1)) if len(data) > 1 else 0.0
    inside = data[(data >= q1 - fence) & (data <= q3 + fence)]
    far = int(np.count_nonzero(np.abs(data - mean) > spread))
    outliers = len(data) - len(inside)
    return {
        "min": float(data.min()),
        "max": float(data.max()),
        "mean": mean,
        "stddev": spread,
        "rounds": len(data),
        "median": median,
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": outliers,
        "stddev_outliers": far,
        "outliers": f"{far};{outliers}",
        "ld15iqr": float(inside.min()),
        "hd15iqr": float(inside.max()),
        "ops": 1 / mean,
        "total": float(data.sum()),
        "data": data.tolist(),
        "iterations": iterations,
    }
