"""Every mask kind through `ab.attention` against the float64 reference: output, LSE and gradients, layouts, groups."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from dispatch_problem import assert_close, problem, to_framework, to_numpy, turned

import attnbench as ab
from attnbench import masks, reference
from attnbench.errors import Unsupported

DRAWN = np.random.default_rng(0)
HOLES = DRAWN.random((2, 24)) < 0.7
HOLES[1] = True
BLOCKS = np.tri(3, dtype=bool)[None, None] & (DRAWN.random((2, 4, 3, 3)) < 0.8) | np.eye(3, dtype=bool)
IDS = np.array([[0] * 10 + [1] * 14, [0] * 3 + [1] * 8 + [2] * 13])
MASKS = {
    "full": ab.masks.full(),
    "causal": ab.masks.causal(),
    "window": ab.masks.window(5, 2),
    "prefix": ab.masks.prefix(7),
    "block_causal": ab.masks.block_causal(np.maximum(0, np.arange(24) - 9) // 3),
    "documents": ab.masks.causal() & ab.masks.documents(IDS),
    "lengths, an empty row": ab.masks.lengths([0, 17]),
    "valid": ab.masks.causal() & ab.masks.valid(HOLES),
    "dilated": ab.masks.dilated([8, 24], [1, 3]),
    "blocks": ab.masks.blocks(BLOCKS, 8),
    "dense": ab.masks.dense(DRAWN.random((4, 24, 24)) < 0.6),
    "alibi": ab.masks.alibi(4),
    "alibi, ragged": ab.masks.causal() & ab.masks.alibi([2.0, 0.5, 0.25, 0.0]) & ab.masks.lengths([24, 17]),
    "dense, added": ab.masks.dense(DRAWN.standard_normal((1, 4, 24, 24)).astype(np.float32)),
}
LAYOUTS = ("bshd", "bhsd", "packed")


def answers(mask, layout):
    """Arrays, output, LSE and gradients with grouped heads, float64 answers first turned into the layout."""
    workload, drawn, (out, lse) = problem(kv_heads=2, mask=mask, pass_="train")
    gradients = reference.attention_gradients(workload, *(x.astype(np.float64) for x in drawn))
    words = {"mask": mask, "layout": layout, "heads": (4, 2) if layout == "packed" else None}
    return turned(drawn, layout), turned([out], layout)[0], lse, turned(gradients, layout), words


def test_every_kind_is_here():
    kinds = {kind for mask in MASKS.values() for kind in mask.kinds}
    made = {name for name, _ in inspect.getmembers(masks, inspect.isfunction) if name in masks.__all__}
    assert kinds == made


@pytest.mark.torch
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_torch(name, layout):
    import torch

    arrays, out, lse, gradients, words = answers(MASKS[name], layout)
    q, k, v, dout = (torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)
    got, got_lse = ab.attention(q, k, v, **words, return_lse=True)
    assert got_lse.dtype == torch.float32
    assert_close(got, out)
    assert_close(got_lse, lse)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    trained = ab.attention(*leaves, **words)
    assert_close(trained.detach(), out)
    for one, want in zip(torch.autograd.grad(trained, leaves, dout), gradients):
        assert_close(one, want, 5e-5)


@pytest.mark.jax
@pytest.mark.parametrize("name", MASKS)
def test_jax(name):
    import jax

    layout = LAYOUTS[list(MASKS).index(name) % 3]
    arrays, out, lse, gradients, words = answers(MASKS[name], layout)
    q, k, v, dout = to_framework("jax", *arrays)
    got, got_lse = ab.attention(q, k, v, **words, return_lse=True)
    assert got_lse.dtype == np.float32
    assert_close(got, out)
    assert_close(got_lse, lse)

    def loss(q, k, v):
        return (ab.attention(q, k, v, **words) * dout).sum()

    for one, want in zip(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v), gradients):
        assert_close(one, want, 5e-5)


@pytest.mark.parametrize("name", MASKS)
def test_numpy(name):
    arrays, out, lse, _, words = answers(MASKS[name], "bshd")
    got, got_lse = ab.attention(*arrays[:3], **words, return_lse=True)
    assert_close(to_numpy("numpy", got), out)
    assert_close(got_lse, lse)


LEAST = float(np.finfo(np.float32).min)
ADDED = np.resize([0.0, -1e9, LEAST, 1e30, -1e4, float(np.finfo(np.float64).min), 1e300], 24)
"""To every key of a row."""


def large_rows(dtype):
    """A bias that a row's keys have in common, and half a row that is as good as hidden; a mask that says the same."""
    bias = np.zeros((24, 24)) + ADDED[:, None]
    hidden = np.zeros((24, 24), bool)
    bias[23], bias[23, :20], hidden[23, :20] = 0.0, LEAST if dtype == np.float32 else -1e300, True
    if dtype == np.float32:
        bias = bias.clip(LEAST, -LEAST)
    return bias.astype(dtype), ab.masks.dense(~hidden)


def raised(lse, bias):
    """The LSE with what was added to each row, in the finite range of float32; nothing is added to the last one."""
    return (lse + np.append(bias[:23, 0], 0.0)).clip(LEAST, -LEAST)


def assert_lse(got, want):
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6, atol=2e-5)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("impl", ["auto", "torch.sdpa", "torch.sdpa-math", "torch.eager"])
def test_a_large_bias_of_whole_rows_changes_only_the_lse_in_torch(impl, dtype):
    import torch

    bias, same = large_rows(dtype)
    arrays, out, lse, gradients, _ = answers(same, "bshd")
    q, k, v, dout = (torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)
    leaves, words = [x.requires_grad_() for x in (q, k, v)], {"mask": ab.masks.dense(bias), "impl": impl}
    got = ab.attention(*leaves, **words)
    assert_close(got.detach(), out)
    for one, want in zip(torch.autograd.grad(got, leaves, dout), gradients):
        assert_close(one, want, 5e-5)
    if impl in ("auto", "torch.eager"):
        got, got_lse = ab.attention(*leaves, **words, return_lse=True)
        assert_lse(got_lse.detach(), raised(lse, bias))
        for one, want in zip(torch.autograd.grad(got, leaves, dout), gradients):
            assert_close(one, want, 5e-5)


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", "torch.sdpa", "torch.eager"])
def test_a_large_bias_that_is_an_array_of_the_call(impl):
    """Also its own gradient, which is the same as without what is added to whole rows."""
    import torch

    from attnbench.dispatch.array_masks import attention_with_array

    bias, same = large_rows(np.float32)
    arrays, out, _, gradients, _ = answers(same, "bshd")
    q, k, v, dout = (torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)
    leaves, added = [x.requires_grad_() for x in (q, k, v)], torch.from_numpy(bias)
    got = attention_with_array(*leaves, bias=added, impl=impl)
    assert_close(got.detach(), out)
    for one, want in zip(torch.autograd.grad(got, leaves, dout), gradients):
        assert_close(one, want, 5e-5)
    of_bias = [
        torch.autograd.grad(attention_with_array(q, k, v, bias=b, impl="torch.eager"), b, dout)[0]
        for b in (added.requires_grad_(), torch.zeros(24, 24, requires_grad=True))
    ]
    torch.testing.assert_close(of_bias[0][:23], of_bias[1][:23])


@pytest.mark.jax
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("impl", ["jax.xla", "jax.einsum"])
def test_a_large_bias_of_whole_rows_changes_only_the_lse_in_jax(impl, dtype):
    import jax

    from attnbench.dispatch.array_masks import attention_with_array

    bias, same = large_rows(dtype)
    arrays, out, lse, gradients, _ = answers(same, "bshd")
    q, k, v, dout = to_framework("jax", *arrays)
    words = {"mask": ab.masks.dense(bias), "impl": impl}
    got, got_lse = ab.attention(q, k, v, **words, return_lse=True)
    assert_close(got, out)
    assert_lse(got_lse, raised(lse, bias))
    calls = [lambda *x: ab.attention(*x, **words)]
    if dtype == np.float32:
        calls.append(lambda *x: attention_with_array(*x, bias=jax.numpy.asarray(bias), impl=impl))
    for call in calls:
        _, gradient = jax.vjp(jax.jit(call), q, k, v)
        for one, want in zip(gradient(dout), gradients):
            assert_close(one, want, 5e-5)


@pytest.mark.jax
def test_jax_shifts_by_what_the_whole_mask_shows():
    """A large bias of a key that a causal mask hides."""
    bias = np.zeros((24, 24), np.float32)
    bias[3, 20] = 1e30
    arrays, out, *_ = answers(ab.masks.causal(), "bshd")
    for impl in ("jax.xla", "jax.einsum"):
        mask = ab.masks.dense(bias) & ab.masks.causal()
        assert_close(ab.attention(*to_framework("jax", *arrays[:3]), mask=mask, impl=impl), out)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("impl", ["numpy.float32", "numpy.reference"])
def test_a_large_bias_of_whole_rows_changes_only_the_lse_in_numpy(impl, dtype):
    bias, same = large_rows(dtype)
    arrays, out, lse, _, _ = answers(same, "bshd")
    got, got_lse = ab.attention(*arrays[:3], mask=ab.masks.dense(bias), impl=impl, return_lse=True)
    assert_close(got, out)
    assert_lse(got_lse, raised(lse, bias))


@pytest.mark.torch
def test_a_pair_refuses_a_large_bias():
    import torch

    q, k, v = (torch.zeros(1, 4, 1, 8, requires_grad=True) for _ in range(3))
    with pytest.raises(Unsupported, match="would be rounded away"):
        ab.attention(q, k, v, mask=ab.masks.dense(np.full((4, 4), -1e9)), impl="torch.pair")
