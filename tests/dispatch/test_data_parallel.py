"""Training over two gloo ranks: DDP and FSDP2 take the step that one process takes with the whole batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
ROUNDING = 1e-6
WAYS = ("DDP", "FSDP2")
IMPLEMENTATIONS = ("auto", "torch.sdpa-flash", "torch.eager", "torch.chunked")


@pytest.fixture(scope="module")
def apart():
    """Largest difference of a gradient or a trained weight, by what ran."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo here")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         Path(__file__).parent / "on_two_ranks.py"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_way_was_tried(apart):
    assert set(apart) == {f"{way}, {name}" for way in WAYS for name in IMPLEMENTATIONS} | {"DDP, compiled"}


@pytest.mark.parametrize("case", [f"{way}, {name}" for way in WAYS for name in IMPLEMENTATIONS] + ["DDP, compiled"])
def test_a_step_over_two_ranks_is_the_step_of_one(apart, case):
    assert apart[case] < ROUNDING
