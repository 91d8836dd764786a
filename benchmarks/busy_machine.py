"""Do runs on a busy machine contradict each other? `python benchmarks/busy_machine.py --runs 20 -o FILE`.

Runs the same few cells again and again beside as many busy processes as the machine has cores, with the threads that a
run chooses there, and with one for each core. Of each pair of implementations on a shape, every run has an interval of
their ratio: what is counted is how many pairs of these intervals exclude each other, and for comparison how many would
if no wait for a core had been counted. Beside that, how often a run called one significantly faster.
"""

from __future__ import annotations

import argparse
import os
from itertools import combinations
from pathlib import Path
from typing import Any

from calibrating import beside
from compare_calibration import spin
from msgspec import structs
from publishing import publish

from attnbench.results.ratios import paired_ratio
from attnbench.results.records import is_anchor, is_timed
from attnbench.run.environment import commit_of
from attnbench.run.launch import Listener, Request, launch
from attnbench.spec import Ok, Record, Workload

IMPLEMENTATIONS = ("torch.sdpa", "torch.eager", "jax.xla", "numpy.float32")
WORKLOADS = tuple(Workload(batch=1, q_len=length, heads=8, head_dim=64) for length in (64, 256))
"""Short calls suffer most: the wait for a core is a hundred times as long as they are."""
Run = dict[str, Ok]


def taken(threads: int | None, budget_s: float) -> Run:
    """Run once and return the timed records by cell."""
    records: list[Record] = []
    request = Request(
        workloads=WORKLOADS, implementations=IMPLEMENTATIONS, device="cpu", threads=threads, budget_s=budget_s
    )
    launch(request, records.extend, Listener())
    return {one.cell.id: one for one in records if is_timed(one) and not is_anchor(one)}


def without_waits(record: Ok) -> Ok:
    """Return the record as it would be if no wait had been counted."""
    return structs.replace(record, time=record.time and structs.replace(record.time, waited=None))


def contradictions(runs: list[Run], plain: bool = False) -> dict[str, Any]:
    """Count the pairs of runs whose intervals of one ratio exclude each other, and the ratios called different."""
    exclude = compared = different = ratios = 0
    for workload in WORKLOADS:
        for names in combinations(IMPLEMENTATIONS, 2):
            both = [[run[cell] for cell in (f"{name}/{workload.id}" for name in names) if cell in run] for run in runs]
            found = [paired_ratio(*(map(without_waits, pair) if plain else pair)) for pair in both if len(pair) == 2]
            ratios += len(found)
            different += sum(one.sign != 0 for one in found)
            for a, b in combinations(found, 2):
                compared += 1
                exclude += a.low > b.high or b.low > a.high
    share = exclude / compared if compared else None
    return {"pairs": compared, "exclude": exclude, "share": share, "ratios": ratios, "called_different": different}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    found: dict[str, Any] = {"commit": commit_of(), "runs": options.runs, "busy_processes": cores}
    runs: dict[str, list[Run]] = {"as a run chooses": [], "one thread per core": []}
    with beside(spin, [()] * cores):
        for number in range(options.runs):
            for name, threads in (("as a run chooses", None), ("one thread per core", cores)):
                runs[name].append(taken(threads, options.budget))
                print(f"{name}, run {number + 1} of {options.runs}", flush=True)
    for name, mine in runs.items():
        environment = next(iter(mine[0].values())).environment
        found[name] = {
            "threads": environment and environment.threads,
            "with_waits": contradictions(mine),
            "without": contradictions(mine, plain=True),
        }
        found |= {"device": environment and environment.device_name, "packages": environment and environment.packages}
    publish(found, options.out)


if __name__ == "__main__":
    main()
