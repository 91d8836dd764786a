"""The block-sparse benchmarks on a CPU, tiny: their form, not their figures; published ones say what is claimed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.masks.block_patterns import SPARSITIES

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


def test_the_best_tile_of_each_kernel_is_taken():
    from block_sparse import combined

    default = {"forward": "a", "query": "b", "key": "c", "dq": "rows"}

    def timed(first: float, second: float, **changed: str):
        return default | changed, {"forward": first, "backward": second}

    taken = [
        timed(2.0, 10.0),
        timed(1.0, 10.1, forward="A"),
        timed(2.1, 9.0, query="B"),
        timed(2.0, 8.0, key="C"),
        timed(2.0, 9.5, dq="atomic"),
        timed(2.0, 7.5, dq="atomic", key="D"),
    ]
    best = {"forward": "A", "query": "B", "key": "C", "dq": "rows"}
    assert combined(default, taken) == best, "10 - 1 - 2 = 7 is less than 7.5"
    faster = timed(2.0, 6.0, dq="atomic", key="E")
    assert combined(default, [*taken, faster]) == best | {"key": "E", "dq": "atomic"}
    assert combined(default, []) == default


QUALITY = {"pattern", "sparsity", "achieved", "recall", "output_error"}


def test_quality_smoke():
    command = [sys.executable, "benchmarks/block_sparse_quality.py", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert {(row["pattern"], row["sparsity"]) for row in case["rows"]} == {
        (pattern, sparsity) for pattern in PATTERNS for sparsity in SPARSITIES
    }
    assert all(set(row) - {"threshold"} == QUALITY for row in case["rows"])
    by_name = {row["pattern"]: row["recall"] for row in case["rows"] if row["sparsity"] == 0.75}
    assert by_name["oracle"] >= max(by_name.values()) - 0.02
    assert by_name["dynamic_threshold"] > by_name["random"]


PATTERNS = ("local", "strided", "global_local", "random", "dynamic_threshold", "learned", "oracle")


def test_the_published_quality_says_what_is_claimed():
    """The learned gate finds more than the plain estimate, and that more than random blocks, on structured inputs."""
    found = json.loads((ROOT / "results/cpu/block_sparse_quality.json").read_text())
    structured = [case for case in found["cases"] if case["case"]["inputs"] == "structured"]
    assert {case["case"]["causal"] for case in structured} == {False, True}
    for case in structured:
        for sparsity in SPARSITIES:
            rows = {row["pattern"]: row for row in case["rows"] if row["sparsity"] == sparsity}
            ordered = [rows[name]["recall"] for name in ("random", "dynamic_threshold", "learned", "oracle")]
            assert ordered == sorted(ordered)
            assert all(abs(row["achieved"] - sparsity) < 0.02 for row in rows.values())
