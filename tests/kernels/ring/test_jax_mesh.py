"""Attention over a JAX mesh: eight devices that one CPU pretends to be, in one process for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")
pytestmark = pytest.mark.jax

from attnbench.kernels.ring.jax_engine import EMPTY, Slots
from attnbench.kernels.ring.schedule import LAYOUTS, positions

HERE = Path(__file__).parent
LARGEST = 3e-5
"""Absolute, in float32, of numbers of order 1 (gradients of K and V add up 60 rows)."""


@pytest.fixture(scope="module")
def seen():
    more = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    flags = {"XLA_FLAGS": more, "JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "jax_on_eight_devices.py"],
        env={**os.environ, **flags, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow(reason="XLA compiles both passes of each case")
def test_a_mesh_gives_what_one_device_gives(seen):
    assert len(seen["cases"]) == 4
    for case, errors in seen["cases"].items():
        assert set(errors) == {"out", "lse", "dq", "dk", "dv"}
        assert max(errors.values()) < LARGEST, (case, errors)


def test_the_record_of_a_mesh(seen):
    record = seen["record"]
    assert (record["how"], record["world"], record["tokens"], record["peaks"]) == ("devices of one process", 2, 61, 2)
    assert record["clock"] == "ranks"
    assert record["ns"] > 0
    assert "so their times are not known" in record["reason"]


def test_float64_and_refusal(seen):
    assert seen["float64"] < 1e-15
    assert "more than the 8 devices" in seen["refused"]


def test_dilated_attention_under_explicit_axes(seen):
    assert set(seen["dilated"]) == {"batch", "tokens", "heads"}
    assert max(seen["dilated"].values()) < LARGEST


def test_one_device_is_refused_with_the_remedy():
    from attnbench.kernels.ring.jax_ring import ALL_GATHER, RING
    from attnbench.spec import Environment

    for implementation in (RING, ALL_GATHER):
        reason = implementation.available(Environment(device="cpu", device_name="test"))
        assert "needs at least two devices in one process, not 1" in reason
        assert "xla_force_host_platform_device_count" in reason


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length, world", [(64, 4), (61, 4), (3, 4), (7, 1)])
def test_slots_hold_what_the_layout_says(layout, length, world):
    slots = Slots(layout, length, world)
    for rank in range(world):
        held = np.concatenate([slots.positions(rank, run, np) for run in range(slots.runs)])
        assert list(held[held < EMPTY]) == list(positions(layout, length, world, rank))
    tokens = np.arange(length)[None]
    assert slots.spread(tokens).shape[1] == slots.size * slots.runs * world
    assert list(np.asarray(slots.gathered(slots.spread(tokens)))[0]) == list(range(length))
