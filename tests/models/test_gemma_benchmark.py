"""The benchmark of the models on a CPU, tiny: its form, not its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from documented import ROOT

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("torch")
pytestmark = [pytest.mark.jax, pytest.mark.torch, pytest.mark.slow]
QUICK = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""To compile."""


def test_smoke(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gemma_models.py", "--smoke", "--only", "stack", "torch", "-o", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=QUICK, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert json.loads(done.stdout) == found
    assert found["environment"]["device"] == "cpu"
    assert set(found["jax"]) == set(found["torch"]) == {"stack train 32", "stack train 64"}
    for one in found["jax"].values():
        assert one["difference"] < 1e-4
        assert one["speedup"] == pytest.approx(one["off"]["ms"] / one["on"]["ms"], abs=1e-3)
        assert one["off"]["temp_bytes"] > 0
        assert len(one["on"]["samples_ms"]) == 3
    for one in found["torch"].values():
        assert one["on"]["peak_bytes"] is None
        assert one["off"]["ms"] > 0
