"""gemma_fast.Attention: the same mathematics as gemma's, a fixed cache, and where the two round differently."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import CHOICES, attention, error, fast_attention, positions, random_params, run, tokens

from attnbench.errors import UsageError
from attnbench.models import gemma_fast
from attnbench.models import masks as token_masks

pytestmark = pytest.mark.jax
BATCH, PREFIX, STEPS = 2, 7, 4
SLOTS = PREFIX + STEPS
PATHS = [{}, *({"use_flash_attention": True, "flash_attention_impl": choice} for choice in CHOICES)]


def ids_of(path):
    return path.get("flash_attention_impl", "standard")


def case(dtype=jnp.float32, length=SLOTS):
    x, at = tokens(BATCH, length, 64, seed=3, dtype=dtype), positions(BATCH, length)
    mask = token_masks.in_blocks((PREFIX, *[1] * (length - PREFIX)))
    params = random_params(attention(), [x], at, mask, None)
    return params, x, at, mask


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
def test_shared_weights_give_the_same_in_float32(path):
    params, x, at, mask = case()
    (wanted,), _ = run(attention(**path), params, [x], at, mask, None)
    found, _ = run(fast_attention(**path), params, x, at, mask, None)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
def test_shared_weights_agree_within_a_hundredth_in_bfloat16(path):
    params, x, at, mask = case(jnp.bfloat16)
    (wanted,), _ = run(attention(**path), params, [x], at, mask, None)
    found, _ = run(fast_attention(cache_dtype="bfloat16", **path), params, x, at, mask, None)
    assert found.dtype == jnp.bfloat16
    assert error(found, wanted) < 1e-2


def test_queries_stay_float32_and_keys_are_rounded_when_stored():
    params, x, at, mask = case(jnp.bfloat16)
    _, (slot, k, v) = run(fast_attention(cache_dtype="bfloat16"), params, x, at, mask, None)
    assert k.dtype == v.dtype == jnp.bfloat16
    assert slot.tolist() == [SLOTS] * BATCH
    (plain,), _ = run(attention(), params, [x], at, mask, None)
    fast, (_, k, _) = run(fast_attention(), params, x, at, mask, None)
    assert k.dtype == fast.dtype == jnp.float32  # without cache_dtype the output is float32, as in openpi
    assert error(fast, plain) > 1e-4  # rounding the rotated queries is not nothing


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
@pytest.mark.parametrize("dtype,limit", [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)])
def test_prefill_and_decode_equal_one_pass(path, dtype, limit):
    params, x, at, mask = case(dtype)
    module = fast_attention(cache_dtype=jnp.dtype(dtype).name, **path)
    whole, _ = run(module, params, x, at, mask, None)
    prefix = token_masks.in_blocks((PREFIX,), kv_len=SLOTS)
    out, cache = run(module, params, x[:, :PREFIX], at[:, :PREFIX], prefix, None)
    assert cache[1].shape == (BATCH, SLOTS, 1, 16)
    assert not np.asarray(cache[1][:, PREFIX:], np.float32).any()
    outs = [out]
    step = jax.jit(lambda *given: module.apply({"params": params}, *given))
    for i in range(PREFIX, SLOTS):
        there = jnp.broadcast_to(jnp.arange(SLOTS) <= i, (BATCH, SLOTS))
        one = token_masks.TokenMask(kv_len=SLOTS, runs=((1, SLOTS),), valid=there)
        before = np.array(cache[1], np.float32)
        out, cache = step(x[:, i : i + 1], at[:, i : i + 1], one, cache)
        np.testing.assert_array_equal(np.asarray(cache[1], np.float32)[:, :i], before[:, :i])
        outs.append(out)
    assert cache[0].tolist() == [SLOTS] * BATCH
    assert error(jnp.concatenate(outs, axis=1), whole) < limit


def test_openpis_boolean_masks_do_the_same():
    params, x, at, _ = case()
    module = fast_attention()
    prefix = token_masks.in_blocks((PREFIX,), kv_len=SLOTS)
    wanted, _ = run(module, params, x[:, :PREFIX], at[:, :PREFIX], prefix, None)
    array = jnp.broadcast_to(prefix.array(), (BATCH, 1, PREFIX, SLOTS))
    found, cache = run(module, params, x[:, :PREFIX], at[:, :PREFIX], array, None)
    np.testing.assert_array_equal(found, wanted)
    assert cache[1].shape[1] == SLOTS


def test_a_cache_takes_one_token_at_a_time():
    params, x, at, mask = case()
    _, cache = run(fast_attention(), params, x, at, mask, None)
    with pytest.raises(UsageError, match="one new token, not 2"):
        run(fast_attention(), params, x[:, :2], at[:, :2], mask, cache)


def test_output_projections_start_at_different_scales():
    """Fan-in is head_dim here and heads * head_dim in gemma: one seed does not give both the same weights."""
    at, mask = positions(1, 2), token_masks.in_blocks((2,))

    def start(module, x):
        made = jax.jit(lambda key: module.init(key, x, at, mask, None))(jax.random.key(0))
        return made["params"]["attn_vec_einsum"]["w"]

    x = tokens(1, 2, 64)
    first, second = start(attention(), [x]), start(fast_attention(), x)
    assert float(second.std() / first.std()) == pytest.approx(8**0.5, rel=0.05)


def test_the_model_has_a_causal_mask_by_default_and_prefill_then_decode_equals_it():
    sizes = gemma_fast.get_config("dummy") | {"vocab_size": 50, "depth": 2}
    model = gemma_fast.Module(**sizes, embed_dtype="float32", cache_dtype="float32")
    text = jnp.asarray(np.random.default_rng(1).integers(0, 50, (BATCH, 6)))
    params = random_params(model, text)
    wanted, _, parts = run(model, params, text)
    assert wanted.shape == (BATCH, 6, 50)
    assert set(parts) == {"encoded", "pre_logits", "logits"}
    causal = token_masks.in_blocks([1] * 4, kv_len=6)
    logits, cache, _ = run(model, params, text[:, :4], mask=causal, positions=positions(BATCH, 4), decode=True)
    found = [logits]
    for i in (4, 5):
        there = jnp.broadcast_to(jnp.arange(6) <= i, (BATCH, 6))
        one = token_masks.TokenMask(kv_len=6, runs=((1, 6),), valid=there)
        at = jnp.full((BATCH, 1), i)
        logits, cache, _ = run(model, params, text[:, i : i + 1], mask=one, positions=at, decode=True, kv_cache=cache)
        found.append(logits)
    assert error(jnp.concatenate(found, axis=1), wanted) < 5e-6
    with pytest.raises(UsageError, match="positions and a mask"):
        model.apply({"params": params}, text, decode=True)


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
def test_layers_hand_on_one_dtype_without_a_cache_dtype(path):
    sizes = gemma_fast.get_config("dummy") | {"vocab_size": 50, "depth": 2}
    text = jnp.asarray(np.random.default_rng(1).integers(0, 50, (BATCH, 6)))
    params = random_params(gemma_fast.Module(**sizes, embed_dtype="float32"), text)
    found, wanted = (
        run(gemma_fast.Module(**sizes, embed_dtype=dtype, **path), params, text) for dtype in ("bfloat16", "float32")
    )
    assert found[2]["encoded"].dtype == jnp.bfloat16
    assert found[1][1].dtype == found[1][2].dtype == jnp.float32
    assert error(found[0], wanted[0]) < 3e-2
