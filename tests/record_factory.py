"""Records made by hand, for the tests of everything that reads records and must not need a worker to get some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnbench import masks
from attnbench.comparing.history import HistoryFile
from attnbench.results.advice import Recommendation
from attnbench.results.recommend import advise
from attnbench.results.records import device_of
from attnbench.results.run_file import Header, NamedRun, Run
from attnbench.results.standings import Standings
from attnbench.spec import (
    Cost,
    Environment,
    Errors,
    Incorrect,
    Memory,
    Ok,
    Record,
    Time,
    Unsupported,
    VerifiedAt,
    Workload,
)

CPU = Environment(
    device="cpu",
    device_name="Test CPU 9000",
    framework="torch",
    cores=2,
    threads=2,
    python="3.11",
    packages={"torch": "2.13.0"},
)


def workload(q_len: int = 128, **fields: Any) -> Workload:
    return Workload(**({"batch": 1, "q_len": q_len, "heads": 4, "head_dim": 32, "mask": masks.causal()} | fields))


def timing(samples: Sequence[float], rounds: Sequence[int] | None = None, **fields: Any) -> Time:
    values = np.asarray(samples, float)
    p50, p95, p99 = (float(x) for x in np.percentile(values, [50, 95, 99]))
    half = 1.96 * float(values.std()) / len(values) ** 0.5
    return Time(
        samples_ns=tuple(float(x) for x in values),
        median_ns=float(np.median(values)),
        ci95_ns=(p50 - half, p50 + half),
        min_ns=float(values.min()),
        max_ns=float(values.max()),
        p50_ns=p50,
        p95_ns=p95,
        p99_ns=p99,
        mean_ns=float(values.mean()),
        std_ns=float(values.std()),
        outliers=0,
        rounds=tuple(rounds) if rounds is not None else (1,) * len(values),
        **fields,
    )


def ok(name: str, samples: Sequence[float] | None = None, on: Workload | None = None, **fields: Any) -> Ok:
    on = on or workload()
    made: dict[str, Any] = {
        "implementation": name,
        "workload": on,
        "environment": CPU,
        "errors": Errors(forward=1e-7, forward_allowed=1e-6, max_abs=1e-6),
        "verified_at": VerifiedAt(shape={"q_len": on.q_len}, share=1.0),
        "deterministic": True,
        "memory": Memory(peak_bytes=None, reason="not asked for", theory_bytes=1000),
        "cost": Cost(flops=10**9, bytes=10**6, tflops=1.5, roofline=0.42),
        "time": None if samples is None else timing(samples),
    }
    return Ok(**(made | fields))


def noisy(median: float, seed: int, spread: float = 0.01, rounds: int = 40) -> np.ndarray:
    """Samples of a machine whose speed drifts; the same seed drifts alike, as interleaved rounds do."""
    drift = np.exp(0.2 * np.sin(np.arange(rounds) / 5))
    return median * drift * np.exp(spread * np.random.default_rng(seed).standard_normal(rounds))


def unsupported(name: str, reason: str, on: Workload | None = None) -> Unsupported:
    return Unsupported(implementation=name, workload=on or workload(), reason=reason, environment=CPU)


def incorrect(name: str, reason: str, on: Workload | None = None, **fields: Any) -> Incorrect:
    return Incorrect(implementation=name, workload=on or workload(), reason=reason, environment=CPU, **fields)


def named_run(name: str, created: str, records: Sequence[Record], dates: Sequence[str] = ()) -> NamedRun:
    """A run file of these records, as if it had been read."""
    header = Header(schema=1, attnbench="", created=created)
    return NamedRun(name, Run(header, {}, tuple(records), dates=tuple(dates)))


def history_file(created: str, records: Sequence[Record], places: Mapping[str, str] = {}) -> HistoryFile:
    return HistoryFile(named_run("", created, records).run, places)


def recommend(*runs: Sequence[Record], against: Sequence[str] = ()) -> list[Recommendation]:
    """The advice that runs support, the oldest run first, device by device."""
    devices = dict.fromkeys(device_of(record) for run in runs for record in run)
    return [
        one
        for device in devices
        for one in advise(Standings([[r for r in run if device_of(r) == device] for run in runs], against))
    ]
