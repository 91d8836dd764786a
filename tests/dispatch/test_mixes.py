"""Models whose layers differ: sliding windows beside global attention, and MLA's keys wider than its values."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import FRAMEWORKS, assert_close, problem, to_framework, to_numpy

import attnbench as ab
from attnbench import reference
from attnbench.dispatch.plan import PLANS
from attnbench.workloads import suites
from attnbench.workloads.catalogue import edge

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
MLA = {"head_dim": 192, "v_head_dim": 128, "q_len": 20, "mask": ab.masks.causal()}
LOCAL, GLOBAL = ab.masks.window(5), ab.masks.causal()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_mla_in_the_fixed_order(framework):
    workload, drawn, (out, lse) = problem(**MLA)
    arrays = to_framework(framework, *drawn[:3])
    assert_close(to_numpy(framework, ab.attention(*arrays, mask=workload.mask)), out)
    got, got_lse = ab.attention(*arrays, mask=workload.mask, return_lse=True)
    assert_close(to_numpy(framework, got), out)
    assert_close(to_numpy(framework, got_lse), lse)
    told = ab.explain(*arrays, mask=workload.mask)
    reasons = {one.name: one.reason for one in told.candidates}
    if framework == "torch":
        assert reasons["torch.sdpa-flash"] == "needs v_head_dim = head_dim, not 128 and 192"
        assert told.pick == "torch.eager"
    if framework == "jax":
        assert reasons["jax.xla"] == "needs v_head_dim = head_dim, not 128 and 192"
        assert told.pick == "jax.einsum"


@pytest.mark.torch
def test_gradients_of_mla():
    import torch

    workload, drawn, _ = problem(**MLA)
    wanted = reference.attention_gradients(workload, *(x.astype(np.float64) for x in drawn))
    *leaves, dout = (torch.from_numpy(x).requires_grad_() for x in drawn)
    got = ab.attention(*leaves, mask=workload.mask)
    for found, want in zip(torch.autograd.grad(got, leaves, dout.detach()), wanted, strict=True):
        assert_close(found, want, 5e-5)


def test_mla_is_among_the_workloads_that_are_verified_and_measured():
    of_mla = [(w.head_dim, w.value_dim) == (192, 128) for w in edge()]
    assert sum(of_mla) == 2
    assert any((w.head_dim, w.value_dim) == (192, 128) for w in suites.load("models").workloads)


@pytest.mark.torch
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sliding_and_global_layers_keep_their_own_plans(compiled):
    """Of one shape, in one model: neither mask may be taken for the other, forward or backward."""
    import torch

    _, drawn, _ = problem()
    q, k, v, dout = (x.astype(np.float64) for x in drawn)
    work = {mask: problem(mask=mask)[0] for mask in (LOCAL, GLOBAL)}
    layers, inputs = [LOCAL, GLOBAL, LOCAL, GLOBAL], [q]
    for mask in layers:
        inputs.append(inputs[-1] + reference.attention(work[mask], inputs[-1], k, v)[0])
    grad, dk, dv = dout, 0, 0
    for mask, x in zip(layers[::-1], inputs[-2::-1]):
        more = reference.attention_gradients(work[mask], x, k, v, grad)
        grad, dk, dv = grad + more[0], dk + more[1], dv + more[2]

    def model(q, k, v):
        for mask in layers:
            q = q + ab.attention(q, k, v, mask=mask)
        return q

    *leaves, seed = (torch.from_numpy(x).requires_grad_() for x in drawn)
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(2):  # the second time from what is kept
        got = run(*leaves)
        assert_close(got.detach(), inputs[-1], 5e-5)
        for found, want in zip(torch.autograd.grad(got, leaves, seed.detach()), (grad, dk, dv), strict=True):
            assert_close(found, want, 2e-4)
    before = len(PLANS)
    run(*leaves)
    assert len(PLANS) == before
