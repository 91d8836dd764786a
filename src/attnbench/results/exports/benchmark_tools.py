"""Formats of other benchmark tools: pytest-benchmark, Google Benchmark, Bencher and github-action-benchmark.

They hold timed cells only, each once, under a name that is safe to print.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from msgspec import Struct

from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.measuring.sampling import round_medians
from attnbench.printable import printable
from attnbench.results.records import machine_differences
from attnbench.results.run_file import NamedRun
from attnbench.results.standings import by_date, setbacks
from attnbench.spec import DIRTY, Environment, Ok, Time

LONGEST_NAME = 1024
"""Characters of the longest name that Bencher takes."""
PYTEST_BENCHMARK_VERSION = "5.3.1"
"""Version of pytest-benchmark with this format."""
GOOGLE_SCHEMA = 1


class Timed(Struct, frozen=True):
    """A cell with a speed, and when it was measured."""

    name: str
    record: Ok
    time: Time
    created: str


def timed(sources: Sequence[NamedRun]) -> list[Timed]:
    """Return the timed cells without the anchors and without times that a newer run found incorrect; these tools know
    a benchmark by its name, so of several the newest counts."""
    found: dict[str, Timed] = {}
    every = by_date(one for source in sources for one in source.run.dated)
    wrong = {id(setback.record) for setback in setbacks([every]) if setback.is_wrong}
    for source in sources:
        for when, record in source.run.dated:
            if not isinstance(record, Ok) or record.time is None or record.implementation in ANCHORS:
                continue
            if id(record) not in wrong:
                name = printable(record.cell.id)
                if len(name) > LONGEST_NAME:  # cut, with digits that tell it from others that begin alike
                    digits = hashlib.sha256(name.encode()).hexdigest()[:12]
                    name = f"{name[: LONGEST_NAME - len(digits) - 1]}-{digits}"
                if name not in found or when >= found[name].created:
                    found[name] = Timed(name, record, record.time, when)
    return list(found.values())


def commits_of(cells: Iterable[Timed]) -> list[str]:
    """Return the different commits of cells, with their marks of other code; an unknown one is empty text."""
    environments = (one.record.environment for one in cells)
    return list(dict.fromkeys("" if one is None else one.commit for one in environments))


def machines_of(cells: Iterable[Timed]) -> list[str]:
    """Return the device of each machine that cells were measured on; an unknown one is empty text."""
    environments = [one.record.environment for one in cells]
    found: list[Environment] = []
    for environment in environments:
        if environment is not None and all(machine_differences(environment, other) for other in found):
            found.append(environment)
    return [*(one.device_name for one in found), *([""] if None in environments else [])]


def _in_common(cells: Iterable[Timed], **names: str) -> dict[str, Any]:
    """Return facts of the environments, by other names, that are known and the same for all cells."""
    environments = [one.record.environment for one in cells]
    values = {
        name: {None if one is None else getattr(one, field) for one in environments} for name, field in names.items()
    }
    return {name: found.pop() for name, found in values.items() if len(found) == 1 and None not in found}


def facts(one: Timed) -> dict[str, str]:
    """Return how a cell was measured, and on which device."""
    environment, cost = one.record.environment, one.record.cost
    told = {"clock": one.time.clock, "workload": one.record.workload.title}
    if environment is not None:
        told |= {"device": environment.device_name, "fingerprint": environment.fingerprint}
        told |= {"commit": environment.commit} if environment.commit else {}
    if cost.tflops is not None:
        told["tflops"] = f"{cost.tflops:.4g}"
    if one.record.approximate:
        told["approximate"] = "yes"
    return {name: printable(text) for name, text in told.items()}


def pytest_benchmark(sources: Sequence[NamedRun]) -> dict[str, Any]:
    """Return the document that `--benchmark-json` would have written, for `pytest-benchmark compare`. Times are in
    seconds, with one group per workload. The commit, and each fact of the machine, is that of all cells, or is not
    named; the time is that of the newest."""
    cells = timed(sources)
    commits = commits_of(cells)
    machine: dict[str, Any] = _in_common(
        cells, node="device_name", machine="device", processor="cpu", system="system", python_version="python"
    )
    if cpu := _in_common(cells, brand_raw="cpu", count="cores"):
        machine["cpu"] = cpu
    return {
        "machine_info": machine,
        "commit_info": {
            "id": commits[0].removesuffix(DIRTY) if len(commits) == 1 else "",
            "dirty": any(commit.endswith(DIRTY) for commit in commits),
        },
        "benchmarks": [_benchmark(one) for one in cells],
        "datetime": max((one.created for one in cells), default=""),
        "version": PYTEST_BENCHMARK_VERSION,
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


def google_benchmark(sources: Sequence[NamedRun]) -> dict[str, Any]:
    """Return Google Benchmark's JSON: a repetition per round and the usual aggregates. Its `compare.py` demands a
    `cpu_time` too. Records hold one clock, so it is the same figure as `real_time`."""
    cells = timed(sources)
    context: dict[str, Any] = {
        "executable": "attnbench",
        "library_build_type": "release",
        "json_schema_version": GOOGLE_SCHEMA,
    }
    if cells:
        context["date"] = max(one.created for one in cells)
        context |= _in_common(cells, num_cpus="cores", host_name="device_name")
    return {"context": context, "benchmarks": [run for n, one in enumerate(cells) for run in _runs(one, n)]}


def _runs(one: Timed, family: int) -> list[dict[str, Any]]:
    times = round_medians(one.time).tolist()
    sizes = [size for size in one.time.rounds if size] if times else [1] * len(one.time.samples_ns)
    times = times or list(one.time.samples_ns)
    shared = {
        "family_index": family,
        "per_family_instance_index": 0,
        "run_name": one.name,
        "repetitions": len(times),
        "threads": 1,
    }
    label = {"label": ", ".join(f"{name}={value}" for name, value in facts(one).items())}

    def run(name: str, ns: float, **kind: Any) -> dict[str, Any]:
        return {"name": name, **shared, **kind, "real_time": ns, "cpu_time": ns, "time_unit": "ns", **label}

    runs = [
        run(one.name, ns, run_type="iteration", repetition_index=n, iterations=size * one.time.calls_per_sample)
        for n, (ns, size) in enumerate(zip(times, sizes))
    ]
    spread, mean = stdev(times) if len(times) > 1 else 0.0, fmean(times)
    totals = {"mean": mean, "median": median(times), "stddev": spread, "cv": spread / mean if mean else 0.0}
    for name, value in totals.items():
        unit = "percentage" if name == "cv" else "time"
        kind = {"run_type": "aggregate", "aggregate_name": name, "aggregate_unit": unit, "iterations": len(times)}
        runs.append(run(f"{one.name}_{name}", value, **kind))
    return runs


def bencher(sources: Sequence[NamedRun]) -> dict[str, Any]:
    """Return Bencher Metric Format: benchmark -> measure -> value with its bounds. Latency is in ns, throughput in
    calls/s, memory in bytes; `bencher run --adapter json --file FILE` reads it."""
    document: dict[str, dict[str, dict[str, float]]] = {}
    for one in timed(sources):
        latency, throughput = {"value": one.time.median_ns}, {"value": 1e9 / one.time.median_ns}
        if one.time.ci95_ns is not None:
            low, high = one.time.ci95_ns
            latency |= {"lower_value": max(low, 0.0), "upper_value": high}
            throughput["lower_value"] = 1e9 / high
            if low > 0:
                throughput["upper_value"] = 1e9 / low
        measures = document[one.name] = {"latency": latency, "throughput": throughput}
        if one.record.memory.peak_bytes is not None:
            measures["peak-memory"] = {"value": float(one.record.memory.peak_bytes)}
    return document


def github_action_benchmark(sources: Sequence[NamedRun]) -> list[dict[str, object]]:
    """Return github-action-benchmark's list (`tool: customSmallerIsBetter`): the median time of each cell in ns.
    `range` is half the interval of the median."""
    entries: list[dict[str, object]] = []
    for one in timed(sources):
        entry: dict[str, object] = {"name": one.name, "unit": "ns", "value": one.time.median_ns}
        if one.time.ci95_ns is not None:
            low, high = one.time.ci95_ns
            entry["range"] = f"± {(high - low) / 2:.0f}"
        entry["extra"] = "\n".join(f"{name}: {value}" for name, value in facts(one).items())
        entries.append(entry)
    return entries
