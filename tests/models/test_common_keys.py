"""pi0's training mask as one call over the common keys and a corner: against the standard path, padding included."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402

from attnbench.impls.ring import jax_blocks  # noqa: E402
from attnbench.models import attend, common_keys, flash  # noqa: E402
from attnbench.models.masks import in_blocks  # noqa: E402

pytestmark = pytest.mark.jax
SIZES, TOKENS = (12, 1, 5), 18
RULE = jax_blocks.Rule(1.0, None)


def seen_by_length(k, lengths):
    return (jnp.arange(k.shape[1]) < lengths[:, None])[:, None, None, None, :]


def plain_forward(q, k, v, lengths):
    out, lse = jax_blocks.forward(q, k, v, seen_by_length(k, lengths), RULE)
    return out.astype(q.dtype), lse


def plain_backward(q, k, v, out, lse, dout, lengths):
    return jax_blocks.backward(q, k, v, (out, lse, dout), seen_by_length(k, lengths), RULE)


PLAIN = plain_forward, plain_backward


def draw(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(4, TOKENS, 4, 8), (4, TOKENS, 1, 8), (4, TOKENS, 1, 8), (4, TOKENS, 4, 8)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


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


@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_values_and_gradients_are_those_of_the_standard_path(kind):
    mask = in_blocks(SIZES, padded(kind), packed=12)
    assert common_keys.has_common_keys(mask)
    q, k, v, dout = draw()
    rows = mask.rows_that_see()

    def ours(q, k, v):
        out = common_keys.attend(q, k, v, mask, 1.0, PLAIN)
        return attend._fill(out, v, rows, "uniform", jnp.float32)

    def standard(q, k, v):
        return attend._fill(
            attend.standard_attention(q, k, v, mask.array(), jnp.float32), v, rows, "uniform", jnp.float32
        )

    for call in (ours, jax.jit(ours)):
        out, pull = jax.vjp(call, q, k, v)
        want, pull_standard = jax.vjp(standard, q, k, v)
        np.testing.assert_allclose(out, want, atol=2e-6)
        for name, got, expected in zip(("dq", "dk", "dv"), pull(dout), pull_standard(dout)):
            np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_the_flash_path_goes_that_way_where_cudnn_is_picked(kind, monkeypatch):
    mask, (q, k, v, _) = in_blocks(SIZES, padded(kind), packed=12), draw()
    asked = []

    def forward(q, k, v, lengths):
        asked.append((q.shape[1], k.shape[1]))
        return plain_forward(q, k, v, lengths)

    monkeypatch.setattr(flash, "pick", lambda *args, **words: "jax.cudnn")
    monkeypatch.setattr(flash, "cudnn_padded_passes", lambda scale: (forward, plain_backward))
    path = attend.Path(use_flash_attention=True, flash_attention_impl="cudnn")
    got = attend.attend(q, k, v, mask, path, jnp.float32)
    assert asked == [(TOKENS, 12)]
    np.testing.assert_allclose(got, attend.attend(q, k, v, mask, attend.Path(), jnp.float32), atol=2e-6)


def test_where_another_is_picked_every_run_is_its_own_call(monkeypatch):
    mask, (q, k, v, _) = in_blocks(SIZES), draw()
    monkeypatch.setattr(flash, "attend_common", lambda *args: pytest.fail("only for cuDNN's own passes"))
    path = attend.Path(use_flash_attention=True, flash_attention_impl="jax")
    got = attend.attend(q, k, v, mask, path, jnp.float32)
    np.testing.assert_allclose(got, attend.attend(q, k, v, mask, attend.Path(), jnp.float32), atol=2e-6)


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
    assert not common_keys.has_common_keys(mask)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device that JAX sees")
@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_cudnn_on_a_gpu(kind):
    mask = in_blocks(SIZES, padded(kind), packed=12)
    rng = np.random.default_rng(1)
    q, dout = (jnp.asarray(rng.standard_normal((4, TOKENS, 8, 256)) / 4, jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((4, TOKENS, 1, 256)) / 4, jnp.bfloat16) for _ in range(2))
    found = []
    for path in (attend.Path(), attend.Path(use_flash_attention=True, flash_attention_impl="cudnn")):
        call = jax.jit(lambda q, k, v, path=path: attend.attend(q, k, v, mask, path, jnp.bfloat16))
        out, pull = jax.vjp(call, q, k, v)
        found.append([np.asarray(x, np.float32) for x in (out, *pull(dout))])
    for standard, ours in zip(*found):
        assert np.isfinite(ours).all()
        assert np.linalg.norm(ours - standard) <= 2e-2 * np.linalg.norm(standard)
