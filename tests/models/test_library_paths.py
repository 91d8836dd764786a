"""tokamax and kvax do not install here: fakes of their documented behaviour stand in, to see what the flash path asks.

What runs on a GPU is in the tests marked so; here it is the arguments that count: lengths, positions, segments.
"""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import tokens

from attnbench.dispatch.attention import Explanation
from attnbench.dispatch.choice import Candidate
from attnbench.impls.jax import kvax as jax_kvax
from attnbench.models import attention
from attnbench.models.attention import standard_attention
from attnbench.models.masks import block_causal, in_blocks
from attnbench.spec import Workload

pytestmark = pytest.mark.jax
SHAPE = {"batch": 2, "q_len": 20, "heads": 4, "kv_heads": 1, "head_dim": 16}


def willing(name):
    """`explain` on a machine where the implementation runs."""

    def explain(q, k, v, *words, **more):
        return Explanation(Workload(**SHAPE, dtype="bfloat16"), "cuda", name, "asked for", [Candidate(name, None)])

    return explain


def case():
    valid = np.random.default_rng(5).random((2, 20)) > 0.3
    valid[:, 12:] = True
    q, k, v = tokens(2, 20, 4, 16, seed=1), tokens(2, 20, 1, 16, seed=2), tokens(2, 20, 1, 16, seed=3)
    return q, k, v, jnp.asarray(valid)


def compare(found, q, k, v, mask):
    seen = np.asarray(mask.rows_that_see())
    wanted = standard_attention(q, k, v, mask.array(), jnp.float32)
    np.testing.assert_allclose(np.asarray(found)[seen], np.asarray(wanted)[seen], atol=3e-6)


def test_tokamax_gets_key_lengths(monkeypatch):
    asked = []

    def dot_product_attention(q, k, v, *, mask, implementation, key_value_seq_lengths, scale):
        asked.append(implementation)
        assert mask is None
        assert scale == 1.0
        seen = jnp.arange(k.shape[1]) < key_value_seq_lengths[:, None, None, None]
        return standard_attention(q, k, v, jnp.broadcast_to(seen, (2, 1, q.shape[1], k.shape[1])), q.dtype)

    fake = types.ModuleType("tokamax")
    fake.dot_product_attention = dot_product_attention
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    monkeypatch.setattr(attention, "explained", willing("jax.tokamax-mosaic"))
    q, k, v, valid = case()
    mask = in_blocks((12, 3, 5), valid)
    compare(jax.jit(attention.flash_attention, static_argnums=4)(q, k, v, mask, "tokamax"), q, k, v, mask)
    assert asked == ["mosaic"] * 3


@pytest.mark.parametrize("form", ["runs", "ids", "suffix"])
def test_kvax_gets_ids_as_positions_and_padding_as_segments(monkeypatch, form):
    calls = []

    def attend(q, k, v, words, *, scale, config, gradients, sequential=False):
        q_at, q_segment, k_at, k_segment = words
        assert [x.shape for x in words] == [(2, q.shape[1])] * 2 + [(2, k.shape[1])] * 2
        assert scale == 1.0
        assert gradients
        assert not sequential
        calls.append(config)
        if not isinstance(k_segment, jax.core.Tracer):
            hidden = np.diff((k_segment < 0).astype(int), axis=1)
            assert (hidden >= 0).all(), "kvax reads whatever lies between two visible blocks"
        seen = (q_at[:, :, None] >= k_at[:, None]) & (q_segment[:, :, None] == k_segment[:, None])
        return standard_attention(q, k, v, seen[:, None], q.dtype)

    monkeypatch.setattr(jax_kvax, "attend", attend)
    monkeypatch.setattr(attention, "explain", willing("jax.kvax"))
    q, k, v, valid = case()
    mask = in_blocks((12, 3, 5), valid)
    if form == "ids":
        mask = block_causal(jnp.zeros(20, int).at[jnp.array([12, 15])].set(1), valid)
    if form == "suffix":
        mask, q = in_blocks((12, 3, 5), valid, queries_from=12), q[:, 12:]
    for attend in (jax.jit(attention.flash_attention, static_argnums=4), attention.flash_attention):
        compare(attend(q, k, v, mask, "kvax"), q, k, v, mask)
    assert calls == [{"block_q": 128, "block_kv": 128, "warps": 8, "stages": 3}] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["auto", "cudnn", "jax", "tokamax", "kvax"])
def test_pi0s_training_mask_on_a_gpu(choice):
    """bfloat16, head_dim 256, one KV head, a missing camera; output and gradients against float32 einsum."""
    from attnbench.errors import Unsupported

    valid = np.ones((2, 867), bool)
    valid[0, 256:512] = False
    mask = in_blocks((816, 1, 50), jnp.asarray(valid))
    q, k, v, cotangent = (tokens(2, 867, n, 256, seed=n, dtype=jnp.bfloat16) for n in (8, 1, 1, 8))
    q = q / 16

    def loss(attend, *given):
        out = jnp.where(valid[..., None, None], attend(*given).astype(jnp.float32), 0)
        return (out * cotangent).sum()

    def by(attend, *given):
        return jax.jit(jax.value_and_grad(lambda *x: loss(attend, *x), argnums=(0, 1, 2)))(*given)

    standard = lambda q, k, v: standard_attention(q, k, v, mask.array(), q.dtype)  # noqa: E731
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        truth = by(standard, *wide)
    plain = by(standard, q, k, v)
    try:
        found = by(lambda q, k, v: attention.flash_attention(q, k, v, mask, choice), q, k, v)
    except Unsupported as refusal:
        pytest.skip(str(refusal))
    for mine, theirs, right in zip(found[1], plain[1], truth[1]):
        size = float(jnp.linalg.norm(right))
        off = [float(jnp.linalg.norm(x.astype(jnp.float32) - right)) / size for x in (mine, theirs)]
        assert off[0] <= 3 * off[1] + 4 * 2**-8
