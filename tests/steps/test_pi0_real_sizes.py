"""pi0's steps at openpi's sizes: traced, not run. What they return is as large as the model."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench import registry
from attnbench.steps import kind_of, pi0
from attnbench.workloads import suites

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytestmark = pytest.mark.jax
REAL = [w for w in suites.load("models-e2e").workloads if w.step.startswith("pi0")]
FORWARD = {
    "pi0-attention": [(32, 816, 2048), (32, 51, 1024)],
    "pi0-block": [(32, 816, 2048), (32, 51, 1024)],
    "pi0-model": [(32, 50, 32), (32, 50)],
    "pi0-sampler": [(1, 50, 32)],
    "pi0-fast-prefill": [(1, 1, 257_152), (18, 1, 1274, 1, 256), (18, 1, 1274, 1, 256)],
    "pi0-fast-decode": [(1, 32, 257_152)],
}


def unwritten(seed: int):
    """Arrays of the right shapes that take no memory."""
    return lambda *shape, fan_in=1: np.broadcast_to(np.float32(0), shape)


@pytest.mark.parametrize("end", ["", "-flash"])
@pytest.mark.parametrize("workload", REAL, ids=lambda w: f"{w.step}-{w.pass_}")
def test_the_whole_model_is_traced(workload, end: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pi0, "normals", unwritten)
    kind, implementation = kind_of(workload.step), registry.get(f"jax.{workload.step}{end}")
    config = {"impl": "jax"} if end else {}
    drawn = {
        name: jax.ShapeDtypeStruct(one.shape, workload.dtype if one.dtype.kind == "f" else "int32")
        for name, one in kind.draw(workload, 0).items()
    }
    function = implementation.function(workload, config)
    found = jax.eval_shape(lambda arrays: function(implementation.state(workload, config, arrays)), drawn)
    outputs = dict(zip(kind.outputs(workload), (one.shape for one in found), strict=True))
    assert list(outputs.values())[: len(FORWARD[workload.step])] == FORWARD[workload.step]
    if workload.needs_gradients:
        layers = (18,) if workload.step == "pi0-model" else ()
        assert outputs["d_q_einsum"] == (*layers, 8, 2048, 256)
        assert outputs["d_attn_vec_einsum_1"] == (*layers, 8, 256, 1024)
