"""`ab.capture` around a step in JAX."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import attnbench as ab

pytestmark = pytest.mark.jax
ORIGINAL = jax.nn.dot_product_attention


def arrays(*shape):
    return [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3)]


def ids(calls):
    return {one.workload.id: one.count for one in calls}


def test_calls_that_run_at_once_are_timed():
    q, k, v = arrays(2, 6, 4, 8)
    mask = jnp.tri(6, dtype=bool)[None, None] & (jnp.arange(6) < jnp.array([[6], [4]]))[:, None, None]
    with ab.capture() as calls:
        jax.nn.dot_product_attention(q, k, v, is_causal=True)
        jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(2, 0))
        jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([6, 3]))
        jax.nn.dot_product_attention(q, k, v, mask=mask)
        jax.nn.dot_product_attention(q[0, :3], k[0], v[0], is_causal=True, scale=0.5)
        ab.attention(q, k, v, impl="jax.xla")
    assert sorted(one.workload.mask.kinds for one in calls) == [
        ("causal",), ("causal",), ("causal", "lengths"), ("causal", "window"), ("full",), ("lengths",),
    ]  # fmt: skip
    assert "b1-t3x6-h4-d8-causal-topleft-float32-forward-scale=0.5" in ids(calls)
    assert 0 < calls.share < 1
    assert "waiting" in calls.method
    assert jax.nn.dot_product_attention is ORIGINAL


def test_a_jitted_step_is_seen_while_it_is_traced():
    q, k, v = arrays(2, 6, 4, 8)
    mask = jnp.tri(6, dtype=bool)[None, None]

    @jax.jit
    def step(q, k, v, mask):
        def loss(q):
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            return jax.nn.dot_product_attention(out, k, v, mask=mask).sum()

        return jax.grad(loss)(q)

    with ab.capture() as calls:
        first = step(q, k, v, mask)
        again = step(q, k, v, mask)
    assert jnp.array_equal(first, again)
    assert ids(calls) == {"b2-t6-h4-d8-causal-float32-train": 1, "b2-t6-h4-d8-full-float32-train": 1}
    assert [one.note.count("values only at run time") for one in calls] == [0, 1]
    assert calls.share is None
    with ab.capture() as calls:
        step(q, k, v, mask)
    assert len(calls) == 0
    assert "compiled before" in calls.reason


def test_flax_with_its_own_attention_and_with_ours():
    nnx = pytest.importorskip("flax.nnx")
    from attnbench.dispatch.flax import attention_fn

    x = jax.random.normal(jax.random.key(1), (2, 6, 16))
    for own in ({}, {"attention_fn": attention_fn}):
        layer = nnx.MultiHeadAttention(4, 16, 16, decode=False, rngs=nnx.Rngs(0), **own)
        with ab.capture() as calls:
            layer(x, is_causal=True)
        assert ids(calls) == {"b2-t6-h4-d4-causal-float32-forward": 1}
