"""`bias=` of `ab.attention`: an array of the call that is added to the logits, with its gradient."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import FRAMEWORKS, assert_close, problem, to_framework, to_numpy, turned

import attnbench as ab
from attnbench import reference
from attnbench.errors import InvalidWorkload, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
MASKS = {
    "none": None,
    "causal": ab.masks.causal(),
    "a row without keys": ab.masks.lengths([0, 17]),
    "alibi": ab.masks.causal() & ab.masks.alibi(4),
    "dilated": ab.masks.dilated([8, 24], [1, 3]),
}
SHAPES = {"whole": (2, 4, 24, 24), "heads": (4, 24, 24), "one row": (1, 1, 1, 24), "one head": (24, 24)}


def answers(mask, shape, sinks=None):
    """Arrays, bias, output and gradients in float64; the bias is one array that broadcasts."""
    _, drawn, _ = problem(kv_heads=2, mask=mask)
    wide = [x.astype(np.float64) for x in drawn]
    bias = np.random.default_rng(3).standard_normal(shape)
    whole = ab.masks.dense(np.broadcast_to(bias, (2, 4, 24, 24)))
    both = ab.Workload(
        batch=2, q_len=24, heads=4, kv_heads=2, head_dim=16, mask=whole if mask is None else mask & whole
    )
    out = reference.attention(both, *wide[:3], sinks)[0]
    grads = reference.attention_gradients(both, *wide, sinks)[:3]
    return drawn, bias, out, grads, bias_gradient(both, *wide, sinks).reshape(2, 4, 24, 24)


def bias_gradient(work, q, k, v, dout, sinks):
    """dS of every pair, from the definition: weight * (dO V - dO O)."""
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    logits = np.einsum("bthd,bshd->bhts", q, k) * work.softmax_scale
    logits = logits + np.broadcast_to(work.mask.bias(work.mask_shape), logits.shape)
    others = np.full((*logits.shape[:3], 1), -np.inf) if sinks is None else np.zeros((*logits.shape[:3], 1))
    others = others if sinks is None else others + sinks[:, None, None]
    every = np.concatenate([logits, others], -1)
    top = every.max(-1, keepdims=True)
    weights = np.exp(every - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    weights = (weights / np.where(total == 0, 1, total))[..., :-1]
    of_v = np.einsum("bthd,bshd->bhts", dout, v)
    return weights * (of_v - (weights * of_v).sum(-1, keepdims=True))


def summed(grad, shape):
    """The gradient of an array that was broadcast."""
    axes = (1,) * (4 - len(shape)) + tuple(shape)
    return grad.sum(tuple(n for n in range(4) if axes[n] == 1), keepdims=True).reshape(shape)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_layout(framework, layout):
    drawn, bias, out, _, _ = answers(MASKS["causal"], SHAPES["heads"])
    arrays = to_framework(framework, *turned(drawn[:3], layout), bias.astype("f4"))
    heads = (4, 2) if layout == "packed" else None
    got = ab.attention(*arrays[:3], bias=arrays[3], mask=MASKS["causal"], layout=layout, heads=heads)
    assert_close(to_numpy(framework, got), turned([out], layout)[0])


@pytest.mark.torch
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_torch_gradients(mask, shape, compiled):
    import torch

    drawn, bias, out, grads, dbias = answers(MASKS[mask], SHAPES[shape])
    *leaves, dout = (torch.from_numpy(x).requires_grad_() for x in drawn)
    leaves.append(torch.from_numpy(bias).float().requires_grad_())
    torch.compiler.reset()
    for impl in ["auto"] if compiled else ["auto", "torch.sdpa", "torch.eager"]:

        def call(q, k, v, bias, impl=impl):
            return ab.attention(q, k, v, bias=bias, mask=MASKS[mask], impl=impl)

        got = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(*leaves)
        assert_close(got.detach(), out)
        found = torch.autograd.grad(got, leaves, dout.detach())
        for one, want in zip(found, [*grads, summed(dbias, SHAPES[shape])], strict=True):
            assert np.abs(want).max() > 1e-3
            assert_close(one, want, 2e-4)


@pytest.mark.torch
def test_a_bias_that_alone_wants_a_gradient_beside_sinks():
    import torch

    sinks = np.array([-1.0, 0.0, 1.0, 3.0])
    drawn, bias, out, _, dbias = answers(MASKS["causal"], SHAPES["one head"], sinks)
    learned = torch.from_numpy(bias).float().requires_grad_()
    given = torch.from_numpy(sinks).float()
    got = ab.attention(*map(torch.from_numpy, drawn[:3]), bias=learned, mask=MASKS["causal"], sinks=given)
    assert_close(got.detach(), out)
    (found,) = torch.autograd.grad(got, learned, torch.from_numpy(drawn[3]))
    assert_close(found, summed(dbias, SHAPES["one head"]), 5e-5)


@pytest.mark.jax
@pytest.mark.parametrize("impl", ["auto", "jax.einsum"])
@pytest.mark.parametrize("mask", MASKS)
def test_jax_gradients(mask, impl):
    import jax

    drawn, bias, out, grads, dbias = answers(MASKS[mask], SHAPES["heads"])
    *arrays, dout, learned = to_framework("jax", *drawn, bias.astype("f4"))

    def loss(q, k, v, bias):
        got = ab.attention(q, k, v, bias=bias, mask=MASKS[mask], impl=impl)
        return (got * dout).sum(), got

    found, got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays, learned)
    assert_close(got, out)
    for one, want in zip(found, [*grads, summed(dbias, SHAPES["heads"])], strict=True):
        assert_close(one, want, 5e-5)


@pytest.mark.torch
def test_what_has_no_gradient_for_a_bias_is_refused():
    import torch

    drawn, bias, _, _, _ = answers(None, SHAPES["whole"])
    arrays, learned = [torch.from_numpy(x) for x in drawn[:3]], torch.from_numpy(bias).float().requires_grad_()
    with pytest.raises(InvalidWorkload, match="constant without gradients"):
        ab.attention(*arrays, bias=learned, impl="torch.sdpa-flash")
    with pytest.raises(InvalidWorkload, match=r"constant without gradients.*bias="):
        ab.masks.dense(learned)
    assert_close(
        ab.attention(*arrays, bias=learned.detach(), impl="torch.sdpa-flash"),
        ab.attention(*arrays, bias=learned, impl="torch.eager").detach(),
    )
    with pytest.raises(Unsupported, match="return_lse together with bias="):
        ab.attention(*arrays, bias=learned, return_lse=True)
    with pytest.raises(Unsupported, match="beyond 64 together with bias="):
        ab.attention(*arrays, bias=learned, mask=ab.masks.dense(np.full((24, 24), -1e9)))
    with pytest.raises(InvalidWorkload, match="does not broadcast"):
        ab.attention(*arrays, bias=torch.zeros(3, 24, 24))
    with pytest.raises(InvalidWorkload, match="inputs are torch arrays, but the mask is of type ndarray"):
        ab.attention(*arrays, bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_a_learned_bias_goes_to_what_has_its_gradient(dtype):
    import torch

    drawn, bias, _, _, dbias = answers(MASKS["causal"], SHAPES["heads"])
    q, k, v, dout = (torch.from_numpy(x).to("cuda", getattr(torch, dtype)) for x in drawn)
    learned = torch.from_numpy(bias).to("cuda", getattr(torch, dtype)).requires_grad_()
    got = ab.attention(q, k, v, bias=learned, mask=MASKS["causal"])
    (found,) = torch.autograd.grad(got, learned, dout)
    want = summed(dbias, SHAPES["heads"])
    off = np.linalg.norm(found.double().cpu().numpy() - want) / np.linalg.norm(want)
    assert off < (1e-3 if dtype == "float32" else 0.05)
    with pytest.raises(Unsupported, match="has the gradient of a bias"):
        ab.attention(q, k, v, bias=learned, impl="torch.sdpa")


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", "torch.sdpa", "torch.eager"])
def test_a_narrower_bias_beside_float64(impl):
    """torch's function reads a float32 mask beside float64 inputs wrongly on a CPU."""
    import torch

    drawn, bias, _, _, _ = answers(None, SHAPES["heads"])
    q, k, v = (torch.from_numpy(x).double() for x in drawn[:3])
    narrow = torch.from_numpy(bias).float()
    want = ab.attention(q, k, v, mask=ab.masks.dense(narrow.double()[None]), impl="torch.eager")
    assert_close(ab.attention(q, k, v, bias=narrow, impl=impl), want, 1e-12)
