"""How much do two processes of the same code differ: `python benchmarks/launch_spread.py [--launches 14] [-o FILE]`.

torch.sdpa in a fresh process per launch, by turns with the settings that make workers of a comparison keep freed memory
and without them. The spread of the launches' medians is what no number of calls within one process can average away.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean, median, stdev

from attnbench.run import protocol as p
from attnbench.run.remote import STEADY_MEMORY, Remote, start
from attnbench.spec import Cell, Workload

WORK = Workload(batch=40, q_len=256, heads=1, head_dim=64)
BLOCKS, TIMEOUT_S = 40, 120.0
SETTINGS = {"keeps freed memory": STEADY_MEMORY, "as the system has it": {}}


def launch_ns(variables: dict[str, str], seed: int) -> tuple[float, dict[str, object]]:
    """Median time of a call in one fresh process, and where it ran."""
    cell = Cell("torch.sdpa", WORK)
    with tempfile.TemporaryFile() as output:
        worker = Remote("torch", *start("attnbench.run.worker", "torch", "cpu", 1, output, (), variables), output)
        try:
            described = worker.ask(p.Describe([]), TIMEOUT_S)
            opened = worker.ask(p.Open(cell, False, True, None, seed, None, False), TIMEOUT_S)
            assert isinstance(described, p.EnvironmentAnswer), described
            assert isinstance(opened, p.Opened), opened
            worker.ask(p.WarmUp(cell.id, None), TIMEOUT_S)
            answers = [worker.ask(p.TakeBlock(cell.id, 1), TIMEOUT_S) for _ in range(BLOCKS)]
        finally:
            worker.kill()
    blocks = [answer.block for answer in answers if isinstance(answer, p.BlockTaken)]
    environment = described.environment
    return median(block.ns["wall"] for block in blocks), {"cpu": environment.cpu, "packages": environment.packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=14)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in SETTINGS}
    environment: dict[str, object] = {}
    for number in range(options.launches):
        for name, variables in SETTINGS.items():
            ns, environment = launch_ns(dict(variables), number)
            taken[name].append(ns)
    rows = {
        name: {
            "spread": round(stdev(each) / fmean(each), 4),
            "range": round(max(each) / min(each) - 1, 4),
            "ns": [round(one) for one in each],
        }
        for name, each in taken.items()
    }
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found = {"workload": WORK.id, "when": when, "environment": environment, "settings": rows}
    print(json.dumps({name: {k: v for k, v in row.items() if k != "ns"} for name, row in rows.items()}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
