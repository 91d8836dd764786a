"""How much of a run is the harness itself: `python benchmarks/overhead.py [-o FILE]`.

Runs the `quick` suite with capped sampling (what `attnbench run --quick` does) and adds up what was import, building
and compiling, verification, and sampling. What is left of the wall time is ours: planning, messages, waiting.
The claim is that it is at most 15 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnbench import registry
from attnbench.run.launch import Listener, Request, launch
from attnbench.spec import Environment, Ok, Record
from attnbench.workloads import suites

CLAIM = 0.15
STAGES = {
    "build": "compile",
    "verify": "verification",
    "profile": "verification",
    "warm_up": "samples",
    "sample": "samples",
}


class Watch(Listener):
    """Notes when the last framework was up."""

    def __init__(self) -> None:
        self.start = self.imported = time.perf_counter()
        self.environments: list[Environment] = []

    def environment(self, framework: str, environment: Environment) -> None:
        self.imported = time.perf_counter()
        self.environments.append(environment)


def measure() -> dict[str, object]:
    records: list[Record] = []
    watch = Watch()
    suite = suites.quicken(suites.load("quick"))
    names, _ = registry.loadable()
    launch(Request(workloads=suite.workloads, implementations=tuple(names), budget_s=0.5), records.extend, watch)
    wall_s = time.perf_counter() - watch.start
    parts = account(records) | {"import": watch.imported - watch.start}
    harness_s = wall_s - sum(parts.values())
    return {
        "wall_s": round(wall_s, 2),
        "parts_s": {name: round(value, 2) for name, value in sorted(parts.items())},
        "harness_s": round(harness_s, 2),
        "harness_share": round(harness_s / wall_s, 4),
        "claim": CLAIM,
        "cells": sum(isinstance(record, Ok) for record in records),
        "environments": [msgspec.to_builtins(environment) for environment in watch.environments],
    }


def account(records: Sequence[Record]) -> dict[str, float]:
    parts = dict.fromkeys(STAGES.values(), 0.0)
    for record in records:
        for stage, spent_ns in (record.spent_ns if isinstance(record, Ok) else {}).items():
            parts[STAGES[stage]] += spent_ns * 1e-9
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    found = measure()
    out = parser.parse_args().out
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "environments"}))


if __name__ == "__main__":
    main()
