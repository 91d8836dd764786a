"""Do the published times hold: `python benchmarks/agreement.py RUN [AGAIN] [-o FILE]` on run files of a GPU.

1. Within a run, for cells over 100 us: the published time against the profiler's sum of kernel times (claim: within
   3 %), and where that sum is what is published, the time between events against it.
2. Between two runs of one suite in two processes: the same cell's two times (claim: median difference under 2 %), and
   the launch-bound cells, those under 50 us, apart (claim: within 3 %).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from publishing import publish

from attnbench.results.run_file import read_run
from attnbench.spec import Ok, Record

LONG_NS, LAUNCH_BOUND_NS = 100e3, 50e3
CLAIM = 0.03


def timed(records: Sequence[Record]) -> dict[str, Ok]:
    found = [
        r for r in records if isinstance(r, Ok) and r.time is not None and not r.implementation.startswith("anchor.")
    ]
    return {record.cell.id: record for record in found}


def kernel_share(record: Ok) -> float | None:
    """Published time / kernel time - 1; None where the published time is the kernel time, or none was taken."""
    assert record.time is not None
    kernel = record.also.get("kernel")
    return None if kernel is None else record.time.median_ns / kernel.median_ns - 1


def events_share(record: Ok) -> float | None:
    """Time between events / published kernel time - 1; None where kernel time is not published, or has no events."""
    assert record.time is not None
    events = record.also.get("events")
    return None if events is None or record.time.clock != "kernel" else events.median_ns / record.time.median_ns - 1


def difference(first: Ok, second: Ok) -> float:
    assert first.time is not None
    assert second.time is not None
    return abs(second.time.median_ns / first.time.median_ns - 1)


def spread(values: dict[str, float]) -> dict[str, object]:
    if not values:
        return {"cells": 0}
    worst = max(values, key=lambda cell: abs(values[cell]))
    return {
        "cells": len(values),
        "median": round(median(abs(v) for v in values.values()), 5),
        "worst": round(abs(values[worst]), 5),
        "worst_cell": worst,
        "apart_by_more_than_3_percent": sorted(cell for cell, value in values.items() if abs(value) > CLAIM),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("again", type=Path, nargs="?")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    first = timed(read_run(options.run).records)
    long = {cell: r for cell, r in first.items() if r.time is not None and r.time.median_ns > LONG_NS}
    shares = {cell: share for cell, r in long.items() if (share := kernel_share(r)) is not None}
    events = {cell: share for cell, r in long.items() if (share := events_share(r)) is not None}
    found: dict[str, object] = {
        "run": options.run.name,
        "published_by_kernel_time": sum(r.time is not None and r.time.clock == "kernel" for r in first.values()),
        "published_against_kernel_sum": spread(shares),
        "events_against_published_kernel_sum": spread(events),
    }
    if options.again is not None:
        second = timed(read_run(options.again).records)
        both = {cell: difference(first[cell], second[cell]) for cell in first if cell in second}
        short = {cell: d for cell, d in both.items() if first[cell].time.median_ns < LAUNCH_BOUND_NS}  # pyright: ignore
        found |= {"again": options.again.name, "two_runs": spread(both), "two_runs_launch_bound": spread(short)}
    publish(found, options.out)


if __name__ == "__main__":
    main()
