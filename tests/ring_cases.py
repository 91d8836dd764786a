"""Problems for rings, and what one device makes of them in float64."""

from __future__ import annotations

import msgspec
import pytest
import torch

from attnbench import masks
from attnbench.errors import Unsupported
from attnbench.impls.torch.eager import EAGER
from attnbench.spec import Workload

WORK = Workload(batch=2, q_len=75, heads=4, kv_heads=2, head_dim=16, mask=masks.causal(), pass_="train")
CASES = {
    "causal, grouped, uneven": {},
    "full": {"mask": masks.full()},
    "more queries than keys": {"q_len": 80, "kv_len": 37, "mask": masks.causal()},
    "more keys than queries, top-left": {"q_len": 37, "kv_len": 80, "mask": masks.causal(align="top-left")},
    "fewer tokens than ranks hold": {"q_len": 3, "kv_len": 3},
    "narrow values": {"v_head_dim": 8, "mask": masks.full()},
    "float64": {"dtype": "float64"},
}
ROUNDING = {"float32": 2e-6, "float64": 1e-14}
"""Relative Frobenius distance that rounding explains."""


def case_of(name):
    return varied(**CASES[name])


def varied(**given):
    """WORK with other values; as many keys as queries unless it is said."""
    return msgspec.structs.replace(WORK, **{"kv_len": given.get("q_len", WORK.q_len), **given})


def draws(work):
    """q, k, v and dout."""
    torch.manual_seed(5)
    dtype = getattr(torch, work.dtype)
    shapes = [
        (work.batch, work.q_len, work.heads, work.head_dim),
        (work.batch, work.kv_len, work.kv_heads, work.head_dim),
        (work.batch, work.kv_len, work.kv_heads, work.value_dim),
        (work.batch, work.q_len, work.heads, work.value_dim),
    ]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def one_device(work, q, k, v, dout):
    """out, lse and gradients of the plain implementation in float64."""
    exact = msgspec.structs.replace(work, dtype="float64")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = EAGER.build_lse(exact, {})(*leaves)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout.double())]


def require_the_numbers_of_one_device(call, work):
    """`call(q, k, v) -> (out, lse)`, and its gradients, to rounding."""
    q, k, v, dout = draws(work)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = call(*leaves)
    found = [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, one_device(work, q, k, v, dout)):
        unseen = torch.isneginf(want)
        assert torch.equal(torch.isneginf(got), unseen), name
        apart = (got.double() - want).masked_fill(unseen, 0.0).norm() / want.masked_fill(unseen, 0.0).norm()
        assert apart <= ROUNDING["float32" if name == "lse" else work.dtype], f"{name} is off by {apart:.1e}"


def require_no_second_gradient(call, work):
    """A gradient of the gradient raises: it is not left out in silence."""
    leaves = [x.requires_grad_() for x in draws(work)[:3]]
    for power in (1, 2):
        (dq,) = torch.autograd.grad(call(*leaves).pow(power).sum(), leaves[:1], create_graph=True)
        for leaf in leaves:
            with pytest.raises(Unsupported, match="second derivatives"):
                torch.autograd.grad(dq.square().sum() + leaf.sum(), leaf, retain_graph=True)
