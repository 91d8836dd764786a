"""The scaling benchmark end to end, small; and a cell over ranks that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from attnbench.spec import Ok, Record

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "ring_scaling.py"


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_measured_and_modelled_are_told_apart(tmp_path):
    out = tmp_path / "scaling.json"
    done = run(sys.executable, SCRIPT, "--smoke", "--tokens", "128", "--pass", "forward", "--gb-per-s", "25", "-o", out)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert [one["world"] for one in found["measured"]] == [1, 2]
    assert all(one["status"] == "ok" and one["seconds"] > 0 for one in found["measured"])
    assert not any("modelled" in one for one in found["measured"])
    assert [one["world"] for one in found["modelled"]] == [1, 2, 4]
    assert all(one["modelled"] is True and one["seconds"] > 0 for one in found["modelled"])
    assert found["stated_link"]["gb_per_s"] == 25.0
    assert "were not measured" in done.stderr
    peaks = [max(one["ranks"]["peak_bytes"]) for one in found["measured"]]
    assert peaks[1] < peaks[0]


def test_a_cell_over_the_ranks_of_torchrun(tmp_path):
    out = tmp_path / "records.jsonl"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    shape = ["--seq-len", "64", "--heads", "4:2", "--head-dim", "16", "--causal", "--layout", "striped"]
    done = run(*start, "-m", "attnbench.run.torchrun", *shape, "--budget", "0.05", "-o", out)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = out.read_text().splitlines()
    record = msgspec.json.decode(line, type=Record)
    assert isinstance(record, Ok), record
    assert (record.ranks.world, record.ranks.how, record.ranks.layout) == (
        2, "processes over gloo, by torchrun", "striped",
    )  # fmt: skip
    assert record.time.clock == "ranks"
    assert record.isolation == "in-process"
    assert record.errors.forward < 1e-6
