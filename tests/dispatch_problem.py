"""A problem with its answer, in every framework and layout, for the tests of `ab.attention`."""

from __future__ import annotations

import numpy as np
import pytest
from policy_factory import policy as made_policy

import attnbench as ab
from attnbench import frameworks, reference
from attnbench.dispatch.demand import environment_of
from attnbench.policy import Alternative, Choice, Entry, shape_of
from attnbench.workloads.inputs import draw

FRAMEWORKS = ["numpy", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "jax"))]
CAUSAL = ab.masks.causal()
SIZES = {"batch": 2, "q_len": 24, "heads": 4, "head_dim": 16}


def to_framework(framework, *arrays):
    return [frameworks.get(framework).array(x, "float32", "cpu") for x in arrays]


def to_numpy(framework, array):
    return frameworks.get(framework).numpy(array)


def problem(seed=0, **fields):
    workload = ab.Workload(**(SIZES | fields))
    drawn = draw(workload, seed)
    wide = [x.astype(np.float64) for x in drawn]
    return workload, drawn, reference.attention(workload, *wide[:3])


def assert_close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=tolerance)


def turned(arrays, layout):
    """bshd arrays in another layout."""
    if layout == "packed":
        return [x.reshape(*x.shape[:2], -1) for x in arrays]
    return [x.transpose(0, 2, 1, 3).copy() for x in arrays] if layout == "bhsd" else list(arrays)


def entry(name, tokens=32, mask=CAUSAL, config=None, rivals=(), pass_="forward", **fields):
    work = ab.Workload(batch=1, q_len=tokens, heads=4, head_dim=16, mask=mask, pass_=pass_)
    alternatives = tuple(Alternative(implementation=other, ratio=ratio) for other, ratio in rivals)
    use = Choice(
        implementation=name, config=config or {}, candidates=1 + len(rivals), alternatives=alternatives,
        measured=work.id, **fields,
    )  # fmt: skip
    return Entry(at=shape_of(work), use=use)


def here(*entries, framework="torch", **changes):
    """A policy of this machine, or of one that differs from it."""
    return made_policy(*entries, at=environment_of(framework, "cpu"), **changes)
