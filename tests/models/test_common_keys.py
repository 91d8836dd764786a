"""pi0's training mask as one call over the common keys and a corner: against the standard path, padding included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attnbench.errors import Unsupported

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp

from attnbench.impls.partial.jax_passes import Rule, block_backward, block_forward
from attnbench.models import attention
from attnbench.models.masks import in_blocks

pytestmark = pytest.mark.jax
SIZES, TOKENS = (12, 1, 5), 18
RULE = Rule(1.0, None)


def seen_by_length(k, lengths):
    return (jnp.arange(k.shape[1]) < lengths[0][:, None])[:, None, None, None, :] if lengths else None


def plain_forward(q, k, v, *lengths):
    out, lse = block_forward(q, k, v, seen_by_length(k, lengths), RULE)
    return out.astype(q.dtype), lse


def plain_backward(q, k, v, out, lse, dout, *lengths):
    grads = block_backward(q, k, v, (out, lse, dout), seen_by_length(k, lengths), RULE)
    return tuple(grad.astype(q.dtype) for grad in grads)


PLAIN = plain_forward, plain_backward


def draw(seed=0, kv_heads=1, slots=TOKENS, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = [(4, TOKENS, 4, 8), (4, slots, kv_heads, 8), (4, slots, kv_heads, 8), (4, TOKENS, 4, 8)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def padded(kind):
    """Valid keys stand first among the prefix's; the last row's prefix is empty."""
    if kind == "whole":
        return None
    valid = np.ones((4, TOKENS), bool)
    valid[0, 7:12] = False
    valid[1, 1:12] = False
    valid[1, 15] = False
    valid[3, :12] = False
    return jnp.asarray(valid)


ALLOWED = {"float32": 1e-5, "bfloat16": 6e-2}


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("kv_heads, slots", [(1, TOKENS), (2, TOKENS), (1, TOKENS + 3)])
@pytest.mark.parametrize("fill", ["uniform", "zero"])
@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_values_and_gradients_are_those_of_the_standard_path(kind, fill, kv_heads, slots, dtype):
    """Also with more slots than the blocks reach; in 16 bits against the standard path in float32."""
    mask = in_blocks(SIZES, padded(kind), packed=12, kv_len=slots)
    assert attention.has_common_keys(mask)
    arrays = draw(kv_heads=kv_heads, slots=slots, dtype=dtype)
    wide = [x.astype(jnp.float32) for x in arrays]
    rows = mask.rows_that_see()

    def ours(q, k, v):
        out = attention.attend_common(q, k, v, mask, 1.0, PLAIN)
        return attention._fill(out, v, rows, fill, jnp.float32)

    def standard(q, k, v):
        out = attention.standard_attention(q, k, v, mask.array(), jnp.float32)
        return attention._fill(out, v, rows, fill, jnp.float32)

    want, pull_standard = jax.vjp(standard, *wide[:3])
    out, pull = jax.vjp(jax.jit(ours), *arrays[:3])
    found, expected = (out, *pull(arrays[3].astype(out.dtype))), (want, *pull_standard(wide[3]))
    for name, got, right in zip(("out", "dq", "dk", "dv"), found, expected):
        off = np.abs(np.asarray(got, np.float32) - np.asarray(right)).max()
        assert off <= ALLOWED[dtype] * max(1.0, float(np.abs(right).max())), name


def test_one_more_axis_by_vmap():
    """Where nothing is padded the kernel gets no lengths, whose batching an older JAX gets wrong."""
    mask = in_blocks(SIZES)
    q, k, v, _ = draw()

    def forward(q, k, v, *lengths):
        assert not lengths
        return plain_forward(q, k, v)

    def call(q, k, v):
        return attention.attend_common(q, k, v, mask, 1.0, (forward, plain_backward))

    def total(q, k, v):
        return call(q, k, v).sum()

    stacked = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    np.testing.assert_allclose(jax.vmap(call)(*stacked)[1], call(*(2 * x for x in (q, k, v))), atol=2e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(total))(*stacked)[0], jax.grad(total)(q, k, v), atol=1e-5)


def test_a_library_that_cannot_after_all_is_a_refusal(monkeypatch):
    def cannot(*arrays):
        raise NotImplementedError("no such engine")

    mask, (q, k, v, _) = in_blocks(SIZES), draw()
    monkeypatch.setattr(attention, "pick", lambda *args, **words: "jax.cudnn")
    monkeypatch.setattr(attention, "cudnn_late_passes", lambda scale, padded: (cannot, cannot))
    path = attention.Path(use_flash_attention=True, flash_attention_impl="cudnn")
    with pytest.raises(Unsupported, match=r"jax.cudnn: no such engine.*fallback=True"):
        attention.attend(q, k, v, mask, path, jnp.float32)
    attention._warned.clear()
    with pytest.warns(UserWarning, match="the standard attention is used"):
        got = attention.attend(q, k, v, mask, replace(path, fallback=True), jnp.float32)
    np.testing.assert_allclose(got, attention.attend(q, k, v, mask, attention.Path(), jnp.float32), atol=2e-6)


def test_a_call_that_breaks_while_it_runs_is_no_refusal(monkeypatch):
    def broken(*arrays):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    mask, (q, k, v, _) = in_blocks(SIZES), draw()
    monkeypatch.setattr(attention, "pick", lambda *args, **words: "jax.cudnn")
    monkeypatch.setattr(attention, "cudnn_late_passes", lambda scale, padded: (broken, broken))
    path = attention.Path(use_flash_attention=True, flash_attention_impl="cudnn", fallback=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        attention.attend(q, k, v, mask, path, jnp.float32)


@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_the_flash_path_goes_that_way_where_cudnn_is_picked(kind, monkeypatch):
    mask, (q, k, v, _) = in_blocks(SIZES, padded(kind), packed=12), draw()
    asked = []

    def forward(q, k, v, *lengths):
        asked.append((q.shape[1], k.shape[1], len(lengths)))
        return plain_forward(q, k, v, *lengths)

    monkeypatch.setattr(attention, "pick", lambda *args, **words: "jax.cudnn")
    monkeypatch.setattr(attention, "cudnn_late_passes", lambda scale, padded: (forward, plain_backward))
    path = attention.Path(use_flash_attention=True, flash_attention_impl="cudnn")
    got = attention.attend(q, k, v, mask, path, jnp.float32)
    assert asked == [(TOKENS, 12, int(kind == "padded"))]
    np.testing.assert_allclose(got, attention.attend(q, k, v, mask, attention.Path(), jnp.float32), atol=2e-6)


def test_where_another_is_picked_every_run_is_its_own_call(monkeypatch):
    mask, (q, k, v, _) = in_blocks(SIZES), draw()
    monkeypatch.setattr(attention, "attend_common", lambda *args: pytest.fail("only for cuDNN's own passes"))
    path = attention.Path(use_flash_attention=True, flash_attention_impl="jax")
    got = attention.attend(q, k, v, mask, path, jnp.float32)
    np.testing.assert_allclose(got, attention.attend(q, k, v, mask, attention.Path(), jnp.float32), atol=2e-6)


@pytest.mark.parametrize(
    "mask",
    [
        in_blocks((12,)),
        in_blocks((12, 300), None),
        in_blocks((12, 6), jnp.ones((4, TOKENS), bool), packed=5),
        in_blocks((12, 6), queries_from=12),
    ],
    ids=["one run", "a large corner", "holes among the common keys", "one run over a cache"],
)
def test_other_masks_have_none(mask):
    assert not attention.has_common_keys(mask)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device that JAX sees")
@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_cudnn_on_a_gpu(kind):
    mask = in_blocks(SIZES, padded(kind), packed=12)
    rng = np.random.default_rng(1)
    q, dout = (jnp.asarray(rng.standard_normal((4, TOKENS, 8, 256)) / 4, jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((4, TOKENS, 1, 256)) / 4, jnp.bfloat16) for _ in range(2))
    found = []
    for path in (attention.Path(), attention.Path(use_flash_attention=True, flash_attention_impl="cudnn")):
        call = jax.jit(lambda q, k, v, path=path: attention.attend(q, k, v, mask, path, jnp.bfloat16))
        out, pull = jax.vjp(call, q, k, v)
        found.append([np.asarray(x, np.float32) for x in (out, *pull(dout))])
    for standard, ours in zip(*found):
        assert np.isfinite(ours).all()
        assert np.linalg.norm(ours - standard) <= 2e-2 * np.linalg.norm(standard)
