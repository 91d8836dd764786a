"""Runs of one machine over time, each with its anchors, for the tests of histories."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from page_factory import source
from record_factory import CPU, ok, workload

from attnbench.results.run_file import NamedRun

ANCHORS = {"anchor.matmul": 1e5, "anchor.copy": 4e5}


def run_at(
    number: int, times: Mapping[str, float], anchors: bool = True, lengths: tuple[int, ...] = (128,)
) -> NamedRun:
    """The run of a day and a commit, on a machine that is now and then twice as slow."""
    environment = msgspec.structs.replace(CPU, commit=f"{number:012x}")
    slow = 1 + number % 2
    noise = np.random.default_rng(number)
    records = [
        ok(name, slow * ns * np.exp(noise.normal(0, 0.003, 6)), on=workload(length), environment=environment)
        for length in lengths
        for name, ns in (times | (ANCHORS if anchors else {})).items()
    ]
    return source(*records, name=f"run-{number}.jsonl", created=f"2026-01-{number + 1:02d}T12:00:00+00:00")


def step_history(runs: int = 12, at: int = 7, lengths: tuple[int, ...] = (128,)) -> list[NamedRun]:
    """torch.sdpa becomes 10 % slower at one run, torch.eager stays."""
    return [
        run_at(n, {"torch.sdpa": 1.1e6 if n >= at else 1e6, "torch.eager": 4e6}, lengths=lengths) for n in range(runs)
    ]
