"""gemma.Attention: openpi's numbers, experts, caches and rows without keys, on both paths."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import CHOICES, DUMMY, attention, error, in_float64, positions, random_params, run, tokens

from attnbench.errors import UnknownName, Unsupported, UsageError
from attnbench.models import gemma
from attnbench.models import masks as token_masks

pytestmark = pytest.mark.jax
EXPERTS = (DUMMY, gemma.Config(width=32, depth=4, mlp_dim=64, num_heads=8, num_kv_heads=1, head_dim=16))
BATCH, PREFIX, SUFFIX = 2, 12, 5
VALID = np.ones((BATCH, PREFIX + SUFFIX), bool)
VALID[0, 3:7] = False  # a hole
VALID[1, 9:PREFIX] = False  # padding on the right
PATHS = [{}, *({"use_flash_attention": True, "flash_attention_impl": choice} for choice in CHOICES)]


def ids_of(path):
    return path.get("flash_attention_impl", "standard")


def case(dtype=jnp.float32):
    xs = [tokens(BATCH, PREFIX, 64, seed=1, dtype=dtype), tokens(BATCH, SUFFIX, 32, seed=2, dtype=dtype)]
    mask = token_masks.in_blocks((PREFIX, 1, SUFFIX - 1), jnp.asarray(VALID))
    at = jnp.cumsum(VALID, axis=1) - 1
    params = random_params(attention(EXPERTS), xs, at, mask, None)
    return params, xs, at, mask


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
@pytest.mark.parametrize("form", ["array", "token mask", "ids"])
def test_float32_against_float64(path, form):
    params, xs, at, mask = case()
    given = {
        "array": mask.array(),
        "token mask": mask,
        "ids": token_masks.block_causal(jnp.zeros(17, int).at[jnp.array([PREFIX, PREFIX + 1])].set(1), VALID),
    }[form]
    found, (k, v) = run(attention(EXPERTS, **path), params, xs, at, given, None)
    assert k.shape == v.shape == (BATCH, PREFIX + SUFFIX, 1, 16)
    assert error(found, in_float64(params, xs, at, np.asarray(mask.array())[:, 0])) < 2e-6


@pytest.mark.parametrize("choice", CHOICES)
def test_bfloat16_is_as_good_as_the_standard_path(choice):
    params, xs, at, mask = case(jnp.bfloat16)
    wanted = in_float64(params, xs, at, np.asarray(mask.array())[:, 0])
    plain, _ = run(attention(EXPERTS), params, xs, at, mask, None)
    flash = attention(EXPERTS, use_flash_attention=True, flash_attention_impl=choice)
    found, _ = run(flash, params, xs, at, mask, None)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    assert error(found, wanted) <= 2 * error(plain, wanted) + 4 * 2**-8


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_those_of_the_standard_path(choice):
    params, xs, at, mask = case()

    def loss(module, params, xs):
        outs, _ = module.apply({"params": params}, xs, at, mask, None)
        return sum(jnp.sum(jnp.sin(3 * out)) for out in outs)

    def gradients(module):
        return jax.jit(jax.grad(lambda *given: loss(module, *given), argnums=(0, 1)))(params, xs)

    wanted = gradients(attention(EXPERTS))
    found = gradients(attention(EXPERTS, use_flash_attention=True, flash_attention_impl=choice))
    assert error(found, wanted) < 5e-6


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
def test_an_expert_of_none_does_not_run(path):
    params, xs, at, _ = case()
    module = attention(EXPERTS, **path)
    mask = token_masks.in_blocks((PREFIX,), jnp.asarray(VALID[:, :PREFIX]))
    first = {name: w for name, w in params.items() if not name.endswith("_1")}
    outs, (k, _) = run(module, first, [xs[0], None], at[:, :PREFIX], mask, None)
    assert outs[1] is None
    assert k.shape[1] == PREFIX
    alone, _ = run(attention(EXPERTS[:1], **path), first, xs[:1], at[:, :PREFIX], mask, None)
    np.testing.assert_array_equal(outs[0], alone[0])


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
def test_suffix_from_a_prefix_cache_equals_one_pass_and_leaves_the_cache(path):
    params, xs, at, mask = case()
    module = attention(EXPERTS, **path)
    whole, _ = run(module, params, xs, at, mask, None)
    prefix = token_masks.in_blocks((PREFIX,), jnp.asarray(VALID[:, :PREFIX]))
    (first, _), cache = run(module, params, [xs[0], None], at[:, :PREFIX], prefix, None)
    kept = jax.tree.map(np.array, cache)
    later = token_masks.in_blocks((PREFIX, 1, SUFFIX - 1), jnp.asarray(VALID), queries_from=PREFIX)
    step = jax.jit(lambda cache: module.apply({"params": params}, [None, xs[1]], at[:, PREFIX:], later, cache))
    (nothing, second), grown = step(cache)
    again = step(cache)[0][1]
    assert nothing is None
    assert grown[0].shape[1] == PREFIX + SUFFIX
    np.testing.assert_array_equal(second, again)
    for before, after in zip(kept, cache):
        np.testing.assert_array_equal(before, after)
    there = VALID[:, :PREFIX]  # rows without keys are the mean over as many keys as there are
    assert error([first[there], second], [whole[0][there], whole[1]]) < 2e-6


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
@pytest.mark.parametrize("form", ["array", "token mask"])
def test_rows_without_keys_in_both_policies(path, form):
    params, xs, at, mask = case()
    given = mask.array() if form == "array" else mask
    outs = {
        policy: run(attention(EXPERTS, fully_masked=policy, **path), params, xs, at, given, None)
        for policy in ("uniform", "zero")
    }
    (_, v) = outs["uniform"][1]
    mean = np.asarray(v).mean(axis=1)[:, None].repeat(8, axis=2)
    projected = np.einsum("btnh,nhd->btd", mean, params["attn_vec_einsum"]["w"])
    for b, i in zip(*np.nonzero(~VALID)):
        np.testing.assert_allclose(outs["uniform"][0][0][b, i], projected[b, 0], atol=2e-5)
        np.testing.assert_array_equal(outs["zero"][0][0][b, i], 0)
    for policy in outs:
        seen = [np.asarray(outs[policy][0][0])[VALID[:, :PREFIX]], outs[policy][0][1]]
        wanted = in_float64(params, xs, at, np.asarray(mask.array())[:, 0])
        assert error(seen, [wanted[0][VALID[:, :PREFIX]], wanted[1]]) < 2e-6


def test_a_batch_row_without_any_token_has_finite_gradients():
    params, xs, at, _ = case()
    nothing = jnp.asarray(VALID).at[0].set(False)
    mask = token_masks.in_blocks((PREFIX, SUFFIX), nothing)

    def gradients(module):
        def loss(params):
            outs, _ = module.apply({"params": params}, xs, at, mask, None)
            return sum(jnp.sum(out**2) for out in outs)

        return jax.jit(jax.grad(loss))(params)

    found = [gradients(attention(EXPERTS, fully_masked="zero", **path)) for path in PATHS]
    assert all(bool(jnp.isfinite(leaf).all()) for tree in found for leaf in jax.tree.leaves(tree))
    assert error(found[1], found[0]) < 5e-6
    assert error(found[2], found[0]) < 5e-6


def test_equal_heads_have_one_projection():
    config = gemma.Config(width=32, depth=1, mlp_dim=64, num_heads=4, num_kv_heads=4, head_dim=8)
    x, at = tokens(1, 6, 32), positions(1, 6)
    mask = token_masks.in_blocks((6,))
    params = random_params(attention((config,)), [x], at, mask, None)
    assert params["qkv_einsum"]["w"].shape == (3, 4, 32, 8)
    assert set(params) == {"qkv_einsum", "attn_vec_einsum"}
    split = {
        "q_einsum": {"w": params["qkv_einsum"]["w"][0]},
        "kv_einsum": {"w": params["qkv_einsum"]["w"][1:]},
        "attn_vec_einsum": params["attn_vec_einsum"],
    }
    for path in PATHS:
        found, _ = run(attention((config,), **path), params, [x], at, mask, None)
        assert error(found, in_float64(split, [x], at, np.ones((1, 6, 6), bool))) < 2e-6


@pytest.mark.parametrize(
    "choice,words",
    [
        ("cudnn", "needs cuda"),
        ("tokamax", "pip install tokamax"),
        ("kvax", "pip install"),
        ("pallas", "no lengths mask"),
    ],
)
def test_an_impl_that_cannot_run_says_why(choice, words):
    params, xs, at, mask = case()
    module = attention(EXPERTS, use_flash_attention=True, flash_attention_impl=choice)
    with pytest.raises(Unsupported, match=f'flash_attention_impl="{choice}" cannot run') as caught:
        run(module, params, xs, at, mask, None)
    assert words in str(caught.value)
    assert "fallback=True" in str(caught.value)


def test_fallback_is_the_standard_path_with_one_warning(monkeypatch):
    monkeypatch.setattr("attnbench.models.attention._warned", set())
    params, xs, at, mask = case()
    module = attention(EXPERTS, use_flash_attention=True, flash_attention_impl="cudnn", fallback=True)
    wanted, _ = run(attention(EXPERTS), params, xs, at, mask, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found, _ = run(module, params, xs, at, mask, None)
    told = [str(one.message) for one in caught if "standard attention is used" in str(one.message)]
    assert len(told) == 1
    assert "jax.cudnn: needs cuda" in told[0]
    assert "fallback" not in told[0]
    np.testing.assert_array_equal(found[0], wanted[0])


def test_the_pallas_kernel_runs_interpreted():
    x, at = tokens(1, 32, 64), positions(1, 32)
    mask = token_masks.in_blocks((32,))
    params = random_params(attention(), [x], at, mask, None)
    module = attention(use_flash_attention=True, flash_attention_impl="pallas")
    found, _ = run(module, params, [x], at, mask, None)
    assert error(found, in_float64(params, [x], at, np.asarray(mask.array())[:, 0])) < 2e-6


def test_mistakes_are_named():
    params, xs, at, mask = case()
    with pytest.raises(ValueError, match=r"the attention mask covers"):
        run(attention(EXPERTS), params, xs, at, mask.array()[:, :, :, :-1], None)
    short = token_masks.in_blocks((PREFIX,))
    with pytest.raises(UsageError, match="covers"):
        run(attention(EXPERTS, use_flash_attention=True), params, xs, at, short, None)
    with pytest.raises(UnknownName, match="cudn"):
        run(attention(EXPERTS, flash_attention_impl="cudn"), params, xs, at, mask, None)
    with pytest.raises(UsageError, match="uniform"):
        run(attention(EXPERTS, fully_masked="mean"), params, xs, at, mask, None)
    with pytest.raises(UnknownName, match=r"Known: auto, cudnn, tokamax, kvax, pallas, jax"):
        run(attention(EXPERTS, flash_attention_impl="triton"), params, xs, at, mask, None)
    for path in ({}, {"use_flash_attention": True}):
        with pytest.raises(UsageError, match="attention mask must be boolean, not float32"):
            run(attention(EXPERTS, **path), params, xs, at, mask.array().astype("float32"), None)
    for wrong in ([None, None], xs[:1], [*xs, None]):
        with pytest.raises(UsageError, match="2 experts need as many token arrays"):
            run(attention(EXPERTS), params, wrong, at, mask, None)
    other = (DUMMY, gemma.Config(width=32, depth=4, mlp_dim=64, num_heads=4, num_kv_heads=1, head_dim=16))
    with pytest.raises(UsageError, match="num_heads"):
        attention(other).init(jax.random.key(0), xs, at, mask, None)
    with pytest.raises(UnknownName, match="gemma_2b"):
        gemma.get_config("gemma_2")
