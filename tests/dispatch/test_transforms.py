"""`ab.attention` under jax.jit, grad, vmap and their products, and under torch.func."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import assert_close, problem, to_framework

import attnbench as ab
from attnbench import reference, registry
from attnbench.dispatch.plan import PLANS, Plans

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
MASKS = {
    "full": None,
    "causal": ab.masks.causal(),
    "an empty row": ab.masks.lengths([0, 17]),
    "bias": ab.masks.dense(np.random.default_rng(1).standard_normal((4, 24, 24)).astype(np.float32)),
}


def problems(mask, count=3):
    """Stacked inputs [count, b, s, h, d], and the answers of each problem alone."""
    found = [problem(seed, kv_heads=2, mask=mask, pass_="train") for seed in range(count)]
    outs = np.stack([out for _, _, (out, _) in found])
    gradients = [
        reference.attention_gradients(work, *(x.astype(np.float64) for x in drawn)) for work, drawn, _ in found
    ]
    inputs = [np.stack(each) for each in zip(*(drawn for _, drawn, _ in found))]
    return inputs, outs, [np.stack(each) for each in zip(*gradients)]


@pytest.mark.jax
@pytest.mark.parametrize("name", MASKS)
def test_jax_vmap_and_jit_of_vmap_of_grad(name):
    import jax

    inputs, outs, gradients = problems(MASKS[name])
    q, k, v, dout = to_framework("jax", *inputs)

    def call(q, k, v):
        return ab.attention(q, k, v, mask=MASKS[name])

    def loss(q, k, v, dout):
        return (call(q, k, v) * dout).sum()

    assert_close(jax.vmap(call)(q, k, v), outs)
    found = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(q, k, v, dout)
    for got, want in zip(found, gradients):
        assert_close(got, want, 5e-5)
    shared = jax.vmap(call, in_axes=(0, None, None))(q, k[0], v[0])
    assert_close(shared[0], outs[0])


@pytest.mark.jax
def test_jax_scan_checkpoint_and_shapes():
    import jax

    inputs, outs, gradients = problems(MASKS["causal"])
    q, k, v, dout = (x[0] for x in to_framework("jax", *inputs))

    def call(q, k, v):
        return ab.attention(q, k, v, mask=MASKS["causal"])

    assert jax.eval_shape(call, q, k, v).shape == q.shape
    _, stacked = jax.lax.scan(lambda carry, _: (carry, call(carry, k, v)), q, None, length=2)
    assert_close(stacked[1], outs[0])
    found = jax.grad(jax.checkpoint(lambda q: (call(q, k, v) * dout).sum()))(q)
    assert_close(found, gradients[0][0], 5e-5)


@pytest.mark.jax
def test_jax_chooses_once_while_it_traces(monkeypatch):
    import jax

    picked = registry.get(ab.explain(*to_framework("jax", *problem()[1][:3])).pick)
    built = []
    build = type(picked).build
    monkeypatch.setattr(type(picked), "build", lambda self, *a: built.append(self.name) or build(self, *a))
    arrays = to_framework("jax", *problem()[1][:3])
    jitted = jax.jit(lambda q, k, v: ab.attention(q, k, v))
    for _ in range(3):
        jitted(*arrays)
    assert built == [picked.name]


@pytest.mark.jax
def test_what_is_built_inside_a_trace_holds_outside():
    """No tracer may stay in a plan."""
    import jax

    _, drawn, (out, _) = problem(mask=ab.masks.lengths([0, 17]), pass_="train")
    arrays = to_framework("jax", *drawn[:3])
    mask = ab.masks.lengths([0, 17])
    for name in ("jax.einsum", "jax.xla"):
        assert_close(jax.jit(lambda *x: ab.attention(*x, mask=mask, impl=name))(*arrays), out)  # noqa: B023
        jax.clear_caches()
        assert_close(jax.jit(lambda *x: ab.attention(*x, mask=mask, impl=name))(*arrays), out)  # noqa: B023


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", "torch.eager", "torch.sdpa-math"])
@pytest.mark.parametrize("name", MASKS)
def test_torch_func(name, impl):
    import torch
    from torch.func import grad, vmap

    inputs, outs, gradients = problems(MASKS[name])
    q, k, v, dout = to_framework("torch", *inputs)

    def call(q, k, v):
        return ab.attention(q, k, v, mask=MASKS[name], impl=impl)

    def loss(q, k, v, dout):
        return (call(q, k, v) * dout).sum()

    found = vmap(grad(loss, argnums=(0, 1, 2)))(q, k, v, dout)
    for got, want in zip(found, gradients):
        assert_close(got, want, 5e-5)
    assert_close(grad(loss)(q[0], k[0], v[0], dout[0]), gradients[0][0], 5e-5)
    assert_close(vmap(call)(q, k, v), outs)
    assert_close(call(q[0], k[0], v[0]), outs[0]), "what was built inside a transform holds outside"
    leaf = q[0].clone().requires_grad_()
    assert_close(torch.autograd.grad(loss(leaf, k[0], v[0], dout[0]), leaf)[0], gradients[0][0], 5e-5)


OWN_GRADIENTS = {
    "auto": ab.masks.lengths([3, 17]),
    "torch.pair": ab.masks.lengths([3, 17]),
    "torch.dilated": ab.masks.dilated([8, 24], [1, 2]),
    "torch.dilated-improved": ab.masks.dilated([8, 24], [1, 2]),
    "torch.block-sparse": ab.masks.blocks(np.tri(3, dtype=bool), 8),
    "torch.chunked": ab.masks.causal(),
}


@pytest.mark.torch
@pytest.mark.parametrize("impl", OWN_GRADIENTS)
def test_torch_func_of_those_with_a_gradient_of_their_own(impl):
    import torch
    from torch.func import grad, jacrev, vmap

    q, k, v, dout = to_framework("torch", *problems(OWN_GRADIENTS[impl])[0])
    learns = impl != "torch.chunked"

    def loss(q, k, v, dout):
        out, lse = ab.attention(q, k, v, mask=OWN_GRADIENTS[impl], impl=impl, return_lse=True)
        return (out * dout).sum((1, 2, 3)) + (lse.square().sum((1, 2)) if learns else 0)

    def total(*arrays):
        return loss(*arrays).sum()

    def wanted(call, *arrays):
        leaves = [x.clone().requires_grad_() for x in arrays[:3]]
        return torch.autograd.grad(call(*leaves, arrays[3]), leaves)

    each = [wanted(total, *arrays) for arrays in zip(q, k, v, dout)]
    for got, want in zip(grad(total, (0, 1, 2))(q[0], k[0], v[0], dout[0]), each[0], strict=True):
        assert_close(got, want, 1e-6)
    found = vmap(grad(total, (0, 1, 2)), in_dims=(1, 0, 0, 0))(q.transpose(0, 1), k, v, dout)
    for got, want in zip(found, zip(*each), strict=True):
        assert_close(got, torch.stack(want), 1e-6)
    rows = jacrev(loss)(q[0], k[0], v[0], dout[0])
    for row in range(2):
        assert_close(rows[row], wanted(lambda *x: loss(*x)[row], q[0], k[0], v[0], dout[0])[0], 1e-6)  # noqa: B023
    with pytest.raises(ab.errors.Unsupported, match="second derivatives"):
        grad(lambda x: grad(total)(x, k[0], v[0], dout[0]).sum())(q[0])


@pytest.mark.torch
def test_inference_and_training_do_not_share_what_they_made():
    import torch

    _, drawn, (out, _) = problem(mask=ab.masks.lengths([3, 17]))
    arrays = to_framework("torch", *drawn[:3])
    mask = ab.masks.lengths([3, 17])
    with torch.inference_mode():
        assert_close(ab.attention(*arrays, mask=mask), out)
    leaves = [x.requires_grad_() for x in arrays]
    ab.attention(*leaves, mask=mask).sum().backward()
    assert all(x.grad is not None for x in leaves)
    with torch.no_grad():
        assert_close(ab.attention(*leaves, mask=mask), out)


@pytest.mark.torch
def test_plans_are_few_and_the_oldest_go_first():
    few = Plans(3, 10)
    for key in range(5):
        few.put(key, print)
    assert [few.get(key) for key in range(5)] == [None, None, print, print, print]
    for key, pairs in (("a", 5), ("b", 5), ("c", 1)):
        few.put(key, print, pairs)
    assert [few.get(key) for key in (4, "a", "b", "c")] == [print, None, print, print]
    few.put("vast", print, 99)
    assert (few.get("vast"), few.get("c")) == (print, None)


@pytest.mark.torch
def test_masks_that_become_arrays_are_forgotten_in_time(monkeypatch):
    arrays = to_framework("torch", *problem()[1][:3])
    monkeypatch.setattr(PLANS, "_limits", (4096, 5 * 10 * 24 * 24))
    for length in range(1, 24):
        ab.attention(*arrays, mask=ab.masks.window(length))
        ab.attention(*arrays, mask=ab.masks.causal())
    assert len(PLANS) == 11


@pytest.mark.jax
def test_one_for_training_alone_under_grad_of_jit_and_remat():
    """`grad(jit(f))` traces a forward pass before anyone knows of the gradient."""
    import jax

    work, drawn, _ = problem(0, kv_heads=2, mask=ab.masks.causal(), pass_="train")
    q, k, v, dout = to_framework("jax", *drawn)
    want = reference.attention_gradients(work, *(x.astype(np.float64) for x in drawn))

    def loss(q, k, v):
        return (ab.attention(q, k, v, mask=ab.masks.causal(), impl="jax.pair") * dout).sum()

    for call in (jax.jit(loss), jax.checkpoint(loss)):
        for got, expected in zip(jax.grad(call, (0, 1, 2))(q, k, v), want):
            assert_close(got, expected)
    with pytest.raises(ab.errors.Unsupported, match="is for training"):
        ab.attention(q, k, v, mask=ab.masks.causal(), impl="jax.pair")


@pytest.mark.torch
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("impl", OWN_GRADIENTS)
def test_vmap_without_gradients_of_those_with_a_gradient_of_their_own(impl, return_lse):
    import torch

    if impl == "torch.pair":
        pytest.skip("is for training")
    mask = ab.masks.dilated([8, 24], [1, 2]) if impl == "auto" else OWN_GRADIENTS[impl]
    q, k, v = (torch.randn(3, 2, 24, heads, 8) for heads in (4, 2, 2))

    def call(q, k, v, impl=impl):
        found = ab.attention(q, k, v, mask=mask, impl=impl, return_lse=return_lse)
        return found if return_lse else (found,)

    for shared in (False, True):
        axes = (0, None, None) if shared else (0, 0, 0)
        given = [q, k[0], v[0]] if shared else [q, k, v]
        found = torch.vmap(call, in_dims=axes)(*given)
        each = [call(*(x if axis is None else x[n] for x, axis in zip(given, axes)), "torch.eager") for n in range(3)]
        for got, want in zip(found, zip(*each)):
            torch.testing.assert_close(got, torch.stack(want), rtol=1e-4, atol=2e-5)


@pytest.mark.jax
@pytest.mark.parametrize("setting", ["numpy_rank_promotion", "numpy_dtype_promotion"])
@pytest.mark.parametrize("impl", ["jax.dilated", "jax.einsum", "jax.xla"])
def test_strict_promotion_of_jax_holds_for_the_users_code_alone(impl, setting):
    import jax
    import jax.numpy as jnp

    from attnbench.dispatch.array_masks import attention_with_array
    from attnbench.kernels.dilated.jax_attention import dilated_attention

    mask = ab.masks.dilated([8, 24], [1, 2]) & ab.masks.causal()
    dtype = jnp.float32 if impl == "jax.xla" else jnp.bfloat16  # JAX's own backward pass is not strict in 16 bits
    arrays = [jax.random.normal(jax.random.key(n), (1, 24, 2, 8), dtype) for n in range(3)]

    def loss(*arrays):
        return ab.attention(*arrays, mask=mask, impl=impl).astype(jnp.float32).sum()

    want = jax.grad(loss)(*arrays)
    with getattr(jax, setting)("raise" if "rank" in setting else "strict"):
        assert (jax.grad(loss)(*arrays) == want).all()
        assert (jax.jit(jax.grad(loss))(*arrays).shape) == want.shape
        dilated_attention(*arrays, [8, 24], [1, 2], causal=True)
        if impl != "jax.dilated":
            attention_with_array(*arrays, bias=jnp.zeros((24, 24), jnp.float32), impl=impl)
        with pytest.raises((ValueError, TypeError)):
            jnp.zeros((2, 3), jnp.bfloat16) + jnp.zeros(3, jnp.float32)
