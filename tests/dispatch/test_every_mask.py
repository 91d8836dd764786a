"""Every mask kind through `ab.attention` against the float64 reference: output, LSE and gradients, layouts, groups."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from dispatch_problem import assert_close, problem, to_framework, to_numpy, turned

import attnbench as ab
from attnbench import reference
from attnbench.workloads import masks

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
