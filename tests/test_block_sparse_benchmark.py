"""benchmarks/block_sparse.py: the whole script on a CPU, tiny; its figures mean nothing here, its form does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[1]


def test_smoke(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/block_sparse.py", "--smoke", "-o", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert json.loads(done.stdout) == found
    assert found["achieved_sparsity"] == 0.75
    assert found["limit"] == 4
    assert set(found["times"]) == {"dense", "flex", "ours"}
    assert all(difference < 1e-5 for difference in found["relative_difference_to_flex"].values())
    for against, target in (("dense", 7.0), ("flex", 1.05)):
        for part in ("forward", "backward"):
            ratio = found["speedup"][against][part]
            assert ratio["ci95"][0] <= ratio["value"] <= ratio["ci95"][1]
            assert ratio["target"] == target
            assert ratio["met"] == (ratio["value"] >= target)
            times = [found["times"][name][part]["rounds_ns"] for name in (against, "ours")]
            assert len(times[0]) == len(times[1]) == 3
            assert ratio["value"] == pytest.approx(sorted(a / b for a, b in zip(*times))[1])
    dense, ours = (
        found["tflops"][name]["forward"] * found["times"][name]["forward"]["median_ns"] for name in ("dense", "ours")
    )
    assert ours / dense == pytest.approx(0.25, rel=0.05), "a quarter of the products is counted"
