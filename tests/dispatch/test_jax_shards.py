"""Arrays that are sharded over a JAX mesh: four devices that one CPU pretends to be, in one process for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import attnbench as ab

SMALL = 1e-5
"""Absolute, of sums of a dozen numbers of order 1 in float32."""
LOCAL = {
    "batch and heads": [2, 2, 2],
    "grouped heads": [2, 2, 1],
    "one key head": [2, 2, 1],
    "batch over both": [1, 4, 4],
}


@pytest.fixture(scope="module")
def seen():
    flags = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "on_four_devices.py"],
        env={**os.environ, **flags}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("case", LOCAL)
def test_each_device_computes_its_own_rows_and_heads(seen, kind, case):
    said = seen[kind][case]
    assert len(said["errors"]) == (3 if kind == "explicit" else 1)
    assert max(said["errors"]) < SMALL
    assert said["asked"] == LOCAL[case]
    assert said["built"] == [LOCAL[case]]


@pytest.mark.parametrize("case", ["tokens", "q alone", "a mask per sequence"])
def test_other_shardings_are_partitioned_by_xla_or_refused(seen, case):
    said = seen["other"][case]
    assert said["error"] < SMALL
    assert said["pick"] in ("jax.xla", "jax.einsum")
    assert "cannot be partitioned by XLA" in said["refused"]
    assert "jax.shard_map" in said["refused"]


def test_a_kernel_that_takes_devices_by_itself_is_refused(seen):
    assert "devices of its own choice" in seen["other"]["ring"]


def test_arrays_that_lie_whole_on_every_device_are_not_sharded(seen):
    assert seen["other"]["replicated"] < SMALL


def test_a_call_outside_jit_is_one_program(monkeypatch):
    """Outside of jit a call runs what a policy measured: the compiled program, traced once for a shape."""
    from attnbench import registry
    from attnbench.spec import Implementation

    traced = []

    class Noting(Implementation):
        name, framework = "jax.noting", "jax"

        def supports(self, workload, environment):
            return None

        def build(self, workload, config):
            inner = registry.get("jax.einsum").build(workload, config)

            def call(q, k, v):
                traced.append(isinstance(q, jax.core.Tracer))
                return inner(q, k, v)

            return call

    with registry.restored():
        registry.register(Noting())
        q = k = v = jax.numpy.ones((1, 5, 2, 8))
        for _ in range(3):
            ab.attention(q, k, v, impl="jax.noting")
    assert traced == [True]
