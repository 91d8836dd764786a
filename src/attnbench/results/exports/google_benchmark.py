"""Google Benchmark's JSON: a repetition per round and the usual aggregates, for its `compare.py` and what reads it.

Records hold one clock: its readers demand a `cpu_time` too, which is therefore the same figure as `real_time`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import Any

from attnbench.results.exports.table import Source
from attnbench.results.exports.timed import Timed, facts, timed
from attnbench.spec import Time

SCHEMA = 1


def google_benchmark(sources: Sequence[Source]) -> dict[str, Any]:
    """The context of the first cell, and the runs of all."""
    cells = timed(sources)
    runs = [run for family, one in enumerate(cells) for run in _runs(one, family)]
    return {"context": _context(cells), "benchmarks": runs}


def _context(cells: Sequence[Timed]) -> dict[str, Any]:
    context: dict[str, Any] = {
        "executable": "attnbench",
        "library_build_type": "release",
        "json_schema_version": SCHEMA,
    }
    if cells:
        environment = cells[0].record.environment
        context["date"] = cells[0].header.created
        if environment is not None:
            context |= {"num_cpus": environment.cores, "host_name": environment.device_name}
    return context


def _runs(one: Timed, family: int) -> list[dict[str, Any]]:
    rounds = round_times(one.time)
    shared = {
        "family_index": family,
        "per_family_instance_index": 0,
        "run_name": one.name,
        "repetitions": len(rounds),
        "threads": 1,
    }
    label = {"label": ", ".join(f"{name}={value}" for name, value in facts(one).items())}
    runs = []
    for index, (ns, calls) in enumerate(rounds):
        kind = {"run_type": "iteration", "repetition_index": index, "iterations": calls}
        runs.append({"name": one.name, **shared, **kind, **_times(ns), **label})
    for name, value in _aggregates([ns for ns, _ in rounds]).items():
        unit = "percentage" if name == "cv" else "time"
        kind = {"run_type": "aggregate", "aggregate_name": name, "aggregate_unit": unit, "iterations": len(rounds)}
        runs.append({"name": f"{one.name}_{name}", **shared, **kind, **_times(value), **label})
    return runs


def round_times(time: Time) -> list[tuple[float, int]]:
    """Median ns of each round and the calls it is of; every sample by itself where there were no rounds."""
    whole = sum(time.rounds) == len(time.samples_ns)
    sizes = [size for size in time.rounds if size] if whole else []
    sizes = sizes or [1] * len(time.samples_ns)
    ends = list(accumulate(sizes))
    parts = [time.samples_ns[end - size : end] for end, size in zip(ends, sizes)]
    return [(median(part), len(part) * time.calls_per_sample) for part in parts]


def _aggregates(rounds: Sequence[float]) -> dict[str, float]:
    spread = stdev(rounds) if len(rounds) > 1 else 0.0
    mean = fmean(rounds)
    return {"mean": mean, "median": median(rounds), "stddev": spread, "cv": spread / mean if mean else 0.0}


def _times(ns: float) -> dict[str, Any]:
    return {"real_time": ns, "cpu_time": ns, "time_unit": "ns"}
