"""Flax's attention layers with our attention_fn compute what they compute with their own."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from attnbench.dispatch import flax as ours
from attnbench.dispatch.flax import attention_fn
from attnbench.errors import Unsupported, UsageError

pytestmark = pytest.mark.jax
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
X = jax.random.normal(jax.random.key(0), (2, 7, 16))
CAUSAL = nn.make_causal_mask(jnp.ones((2, 7)))
PADDED = nn.combine_masks(CAUSAL, nn.make_attention_mask(jnp.ones((2, 7)), jnp.arange(7) < jnp.array([[7], [5]])))
MASKS = {"none": None, "causal": CAUSAL, "causal and padding": PADDED}


def linen_layer(attention=None, **more):
    own = {} if attention is None else {"attention_fn": attention}
    return nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=16, **own, **more)


def nnx_layer(attention=None, **more):
    own = {} if attention is None else {"attention_fn": attention}
    fields = {"num_heads": 4, "in_features": 16, "qkv_features": 16, "decode": False} | own | more
    return nnx.MultiHeadAttention(rngs=nnx.Rngs(0), **fields)


def same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), one, other)


@pytest.mark.parametrize("mask", MASKS)
def test_linen(mask):
    weights = linen_layer().init(jax.random.key(1), X)

    def loss(attention, weights, x):
        out = linen_layer(attention).apply(weights, x, mask=MASKS[mask])
        return (out**2).sum(), out

    def run(attention):
        return jax.jit(jax.value_and_grad(partial(loss, attention), argnums=(0, 1), has_aux=True))(weights, X)

    same(run(attention_fn), run(None))


@pytest.mark.parametrize(
    ("kv_heads", "mask"),
    [(4, "causal and padding"), *((2, mask) for mask in (*MASKS, "is_causal", "is_causal and padding"))],
)
def test_nnx(kv_heads, mask):
    is_causal = mask.startswith("is_causal")
    array = PADDED if mask.endswith("padding") else MASKS.get(mask)

    def run(attention):
        layer = nnx_layer(attention, num_kv_heads=kv_heads)

        def loss(layer, x):
            return (layer(x, mask=array, is_causal=is_causal) ** 2).sum()

        value, (weights, x) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(layer, X)
        return value, nnx.to_pure_dict(weights), x

    same(run(attention_fn), run(None))


def test_a_causal_layer_needs_no_array(monkeypatch):
    asked, right = [], ours.dispatch.attention
    monkeypatch.setattr(ours.dispatch, "attention", lambda *a, **k: (asked.append(k["mask"].id), right(*a, **k))[1])
    nnx_layer(attention_fn)(X, is_causal=True)
    assert asked == ["causal"]


def test_decoding_with_the_cache_of_linen():
    def decode(attention):
        layer = linen_layer(attention, decode=True)
        variables = layer.init(jax.random.key(1), X)
        weights, cache = {"params": variables["params"]}, variables["cache"]
        step = jax.jit(lambda weights, cache, x: layer.apply({**weights, "cache": cache}, x, mutable=["cache"]))
        found = []
        for at in range(X.shape[1]):
            out, changed = step(weights, cache, X[:, at : at + 1])
            cache = changed["cache"]
            found.append(out)
        return weights, jnp.concatenate(found, axis=1)

    weights, stepwise = decode(attention_fn)
    same(stepwise, decode(None)[1])
    same(stepwise, linen_layer().apply(weights, X, mask=CAUSAL))


def test_decoding_with_the_cache_of_nnx():
    def decode(attention):
        layer = nnx_layer(attention, decode=True, num_kv_heads=2)
        layer.init_cache(X.shape)
        return jnp.concatenate([layer(X[:, at : at + 1]) for at in range(X.shape[1])], axis=1)

    same(decode(attention_fn), decode(None))
    same(decode(attention_fn), nnx_layer(num_kv_heads=2)(X, mask=CAUSAL))


@pytest.mark.parametrize("impl", ["jax.einsum", "jax.xla"])
def test_a_named_implementation(impl):
    same(nnx_layer(partial(attention_fn, impl=impl))(X, mask=PADDED), nnx_layer()(X, mask=PADDED))


@pytest.mark.parametrize(
    ("lead", "bias_axes"), [((), "one"), ((2,), None), ((2,), "all"), ((3, 2), "one"), ((3, 2), "all")], ids=str
)
def test_any_batch_axes_and_a_bias(lead, bias_axes):
    keys = jax.random.split(jax.random.key(2), 5)
    q, k, v = (jax.random.normal(key, (*lead, 5, 4, 8)) for key in keys[:3])
    mask = jax.random.bernoulli(keys[3], 0.6, (*lead, 1, 5, 5)) | jnp.eye(5, dtype=bool)
    heads = (*lead, 4) if bias_axes == "all" else (4,)
    bias = None if bias_axes is None else jax.random.normal(keys[4], (*heads, 5, 5))
    same(jax.jit(attention_fn)(q, k, v, bias, mask), jax.jit(nn.dot_product_attention)(q, k, v, bias, mask))


def test_a_learned_bias_gets_its_gradient():
    q = jax.random.normal(jax.random.key(3), (2, 5, 4, 8))
    bias = jnp.zeros((4, 5, 5))

    def loss(attention, bias):
        return (attention(q, q, q, bias) ** 2).sum()

    found, expected = (jax.jit(jax.grad(partial(loss, one)))(bias) for one in (attention_fn, nn.dot_product_attention))
    same(found, expected)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_a_row_that_sees_nothing_gives_0_and_no_nan_gradients(jitted):
    q = jax.random.normal(jax.random.key(4), (1, 3, 2, 8))
    mask = jnp.array([[[[True, True, True], [False] * 3, [True, False, False]]]])

    def loss(q, mask):
        out = attention_fn(q, q, q, mask=mask)
        return (out**2).sum(), out

    step = jax.value_and_grad(loss, has_aux=True)
    (_, out), gradient = (jax.jit(step) if jitted else step)(q, mask)
    assert not out[0, 1].any()
    assert out[0, 0].any()
    assert jnp.isfinite(gradient).all()


def test_the_dtype_of_the_layer():
    layer, own = nnx_layer(attention_fn, dtype=jnp.bfloat16), nnx_layer(dtype=jnp.bfloat16)
    found = layer(X, mask=PADDED)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(float), own(X, mask=PADDED).astype(float), rtol=0.05, atol=0.02)


@pytest.fixture
def precisions(monkeypatch):
    """Of the products inside, as each call finds them set."""
    found, right = [], ours.dispatch.attention

    def attention(*a, **k):
        found.append(jax.config.jax_default_matmul_precision)
        return right(*a, **k)

    monkeypatch.setattr(ours.dispatch, "attention", attention)
    return found


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGH])
def test_precision_is_handed_on(precision, precisions):
    nnx_layer(attention_fn, precision=precision)(X)
    assert precisions == [getattr(precision, "name", precision).lower()]


PRESET = jax.lax.DotAlgorithmPreset
SAME_PRECISIONS = {
    PRESET.F32_F32_F32: "F32_F32_F32",
    PRESET.DEFAULT: "default",
    "BF16_BF16_F32_X3": "BF16_BF16_F32_X3",
    "fastest": "default",
    "bfloat16_3x": "high",
    "float32": "highest",
    ("high", "high"): "high",
    (jax.lax.Precision.HIGHEST,) * 2: "highest",
}


@pytest.mark.parametrize("precision", SAME_PRECISIONS, ids=str)
def test_precisions_that_flax_takes(precision, precisions):
    q = jax.random.normal(jax.random.key(5), (2, 5, 4, 8))
    expected = nn.dot_product_attention(q, q, q, precision=precision)
    np.testing.assert_allclose(attention_fn(q, q, q, precision=precision), expected, rtol=0.05, atol=0.05)
    assert precisions == [SAME_PRECISIONS[precision]]


class TestRefused:
    def test_dropout_while_training(self):
        layer = linen_layer(attention_fn, dropout_rate=0.1)
        weights = layer.init(jax.random.key(1), X, deterministic=True)
        layer.apply(weights, X, deterministic=True)
        with pytest.raises(Unsupported, match=r"not support dropout, but this layer asks for 0\.1: set dropout_rate=0"):
            layer.apply(weights, X, deterministic=False, rngs={"dropout": jax.random.key(2)})

    @pytest.mark.parametrize("make", [linen_layer, nnx_layer])
    def test_sown_weights(self, make):
        layer = make(attention_fn)
        call = partial(layer.init, jax.random.key(1)) if make is linen_layer else layer
        with pytest.raises(Unsupported, match="sow_weights"):
            call(X, sow_weights=True)

    def test_einsums_of_ones_own(self):
        layer = linen_layer(attention_fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum,
                            attn_weights_value_einsum_cls=lambda: jnp.einsum)  # fmt: skip
        with pytest.raises(Unsupported, match="einsum"):
            layer.init(jax.random.key(1), X)

    def test_two_precisions(self):
        with pytest.raises(Unsupported, match="one precision"):
            attention_fn(X[..., None, :], X[..., None, :], X[..., None, :], precision=("high", "highest"))

    def test_an_algorithm_in_fields(self):
        fields = jax.lax.DotAlgorithm(np.float32, np.float32, np.float32)
        with pytest.raises(Unsupported, match="takes a DotAlgorithmPreset"):
            attention_fn(X[..., None, :], X[..., None, :], X[..., None, :], precision=fields)

    def test_a_precision_that_is_none(self):
        with pytest.raises(UsageError, match="'exact' is not a precision that JAX knows"):
            attention_fn(X[..., None, :], X[..., None, :], X[..., None, :], precision="exact")

    def test_an_implementation_that_cannot(self):
        with pytest.raises(Unsupported, match=r"jax\.cudnn"):
            nnx_layer(partial(attention_fn, impl="jax.cudnn"))(X, mask=PADDED)
