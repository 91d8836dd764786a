"""TokenMask: openpi's mask without T x S, and the calls that the flash path makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import tokens
from policy_factory import policy

import attnbench as ab
from attnbench import registry
from attnbench.dispatch.demand import environment_of
from attnbench.errors import InvalidWorkload
from attnbench.impls.jax.nn import Xla
from attnbench.masks import MaskShape
from attnbench.models import attention
from attnbench.models.attention import Path, attend, standard_attention
from attnbench.models.masks import (
    TokenMask,
    WrongMaskShape,
    block_causal,
    in_blocks,
    known,
    make_attn_mask,
)
from attnbench.policy import Choice, Entry, shape_of

pytestmark = pytest.mark.jax
PI0 = (816, 1, 50)
AR = np.concatenate([np.zeros(816), [1], [1], np.zeros(49)]).astype(bool)


def by_definition(valid, mask_ar):
    """cumsum(mask_ar)[j] <= cumsum(mask_ar)[i], and both valid."""
    ids = np.cumsum(np.broadcast_to(mask_ar, valid.shape), axis=1)
    return (ids[:, None, :] <= ids[:, :, None]) & valid[:, None, :] & valid[:, :, None]


def some_valid(batch, length, seed=0):
    return np.random.default_rng(seed).random((batch, length)) > 0.3


@pytest.mark.parametrize("ar", ["111111", "000111", "1010100100", "011000"])
def test_ids_and_the_dense_form_are_openpis_rule(ar):
    mask_ar = np.array([int(c) for c in ar])
    valid = some_valid(3, len(ar))
    wanted = by_definition(valid, mask_ar)
    np.testing.assert_array_equal(block_causal(jnp.asarray(mask_ar), jnp.asarray(valid)).array()[:, 0], wanted)
    np.testing.assert_array_equal(make_attn_mask(jnp.asarray(valid), jnp.asarray(mask_ar)), wanted)


def test_runs_say_what_pi0s_ids_say():
    valid = some_valid(2, 867)
    mask = in_blocks(PI0, jnp.asarray(valid))
    assert mask.runs == ((816, 816), (1, 817), (50, 867))
    wanted = by_definition(valid, AR)
    np.testing.assert_array_equal(mask.array()[:, 0], wanted)
    np.testing.assert_array_equal(mask.rows_that_see(), wanted.any(-1))
    mine = ab.masks.block_causal(np.cumsum(AR)) & ab.masks.valid(valid)
    seen = mine.array(MaskShape(2, 1, 867, 867)) & valid[:, None, :, None]
    np.testing.assert_array_equal(mask.array(), seen)


def test_queries_of_the_suffix_and_empty_slots():
    valid = some_valid(2, 10)
    whole = by_definition(valid, np.array([0, 0, 0, 0, 0, 0, 1, 1, 0, 0]))
    suffix = in_blocks((6, 1, 3), jnp.asarray(valid), queries_from=6)
    np.testing.assert_array_equal(suffix.array()[:, 0], whole[:, 6:])
    roomy = in_blocks((6, 1, 3), jnp.asarray(valid), kv_len=14)
    np.testing.assert_array_equal(roomy.array()[:, 0], np.pad(whole, ((0, 0), (0, 0), (0, 4))))
    without = in_blocks((6, 4), kv_len=14)
    assert without.array().shape == (1, 1, 10, 14)
    assert not without.array()[..., 10:].any()
    assert without.rows_that_see() is None


def test_rows_that_see_looks_where_nothing_is_promised():
    valid = jnp.asarray([[False, False, True, True], [True, False, False, False]])
    mask = TokenMask(kv_len=4, runs=((1, 2), (1, 4)), valid=valid)
    assert mask.rows_that_see().tolist() == [[False, True], [True, True]]
    ids = TokenMask(kv_len=4, ids=jnp.asarray([[2, 2, 1, 3]] * 2), q_ids=jnp.asarray([[0, 1]] * 2), valid=valid)
    assert ids.rows_that_see().tolist() == [[False, True], [False, False]]


def test_long_runs_are_kernel_calls_and_short_ones_share_a_small_array():
    valid = jnp.ones((1, 867), bool)
    assert attention.calls_of_runs(in_blocks(PI0, valid), "auto") == [
        (0, 816, 816, "lengths", "auto"),
        (816, 867, 867, "array", "jax"),
    ]
    assert [(call.form, call.choice) for call in attention.calls_of_runs(in_blocks(PI0), "cudnn")] == [
        ("none", "cudnn")
    ] * 3
    assert [call.form for call in attention.calls_of_runs(in_blocks(PI0, valid), "cudnn")] == ["lengths"] * 3
    decode = TokenMask(kv_len=1274, runs=((1, 1274),), valid=jnp.ones((1, 1274), bool))
    assert attention.calls_of_runs(decode, "auto") == [(0, 1, 1274, "array", "jax")]
    assert attention.calls_of_runs(in_blocks((50,)), "auto") == [(0, 50, 50, "none", "jax")]


@pytest.mark.parametrize("packed", [0, 12])
@pytest.mark.parametrize("choice", ["jax", "auto"])
def test_holes_are_closed_by_moving_keys(packed, choice, monkeypatch):
    """With `packed` the first keys are already in order, and only the others are moved."""
    monkeypatch.setattr(attention, "SHORT", 4)
    valid = some_valid(3, 20, seed=4)
    valid[:, 13:] = True
    if packed:
        valid[:, :packed] = np.sort(valid[:, :packed], axis=1)[:, ::-1]
    mask = in_blocks((12, 3, 5), jnp.asarray(valid), packed=packed)
    q, k, v = tokens(3, 20, 4, 8, seed=1), tokens(3, 20, 2, 8, seed=2), tokens(3, 20, 2, 8, seed=3)
    found = jax.jit(attention.flash_attention, static_argnums=4)(q, k, v, mask, choice)
    wanted = standard_attention(q, k, v, mask.array(), jnp.float32)
    seen = np.asarray(mask.rows_that_see())
    np.testing.assert_allclose(np.asarray(found)[seen], np.asarray(wanted)[seen], atol=2e-6)


class Named(Xla):
    """XLA's under another name."""

    def __init__(self, name):
        self.name = name


def test_padding_inside_jit_is_chosen_for_by_pass(monkeypatch):
    """A policy's forward entry where nothing is differentiated, its training entry where something is."""
    monkeypatch.setattr(attention, "SHORT", 4)
    q, k = tokens(2, 12, 4, 8, seed=1), tokens(2, 12, 2, 8, seed=2)
    mask = in_blocks((12,), jnp.asarray(np.arange(12) < [[12], [9]]))
    used, run = [], attention.attend_in_jit
    monkeypatch.setattr(attention, "attend_in_jit", lambda name, *arrays: used.append(name) or run(name, *arrays))

    def entry(name, pass_):
        work = ab.Workload(batch=2, q_len=12, heads=4, kv_heads=2, head_dim=8, pass_=pass_)
        return Entry(at=shape_of(work), use=Choice(implementation=name, candidates=1, measured=work.id))

    chosen = policy(entry("jax.swift", "forward"), entry("jax.trainer", "train"), at=environment_of("jax", "cpu"))

    def loss(q):
        return (attention.flash_attention(q, k, k, mask, "auto") ** 2).sum()

    with registry.restored(), ab.use_policy(chosen, on_miss="error"):
        for name in ("jax.swift", "jax.trainer"):
            registry.register(Named(name))
        found = [loss(q), jax.jit(loss)(q)]
        assert set(used) == {"jax.swift"}
        used.clear()
        gradient = jax.grad(loss)(q)
        assert set(used) == {"jax.trainer"}
        compiled = jax.jit(jax.grad(jax.checkpoint(loss)))(q)
    wanted = jax.grad(lambda q: (standard_attention(q, k, k, mask.array(), jnp.float32) ** 2).sum())(q)
    for one in (gradient, compiled):
        np.testing.assert_allclose(one[0], wanted[0], atol=5e-6)
        np.testing.assert_allclose(one[1, :9], wanted[1, :9], atol=5e-6)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_the_flash_path_holds_no_square_array(monkeypatch):
    """The program of a long run with padding has no [.., T, S] boolean among its constants or arguments."""
    mask = in_blocks((256, 1, 50), jnp.ones((2, 307), bool), packed=256)
    shapes = [leaf.shape for leaf in jax.tree.leaves(mask.with_order())]
    assert all(len(shape) == 2 for shape in shapes)
    q, k = (jax.ShapeDtypeStruct((2, 307, n, 16), jnp.float32) for n in (8, 1))
    calls = []
    run = attention.attend_in_jit
    monkeypatch.setattr(attention, "attend_in_jit", lambda *given: calls.append(given) or run(*given))
    jax.eval_shape(lambda q, k, v: attention.flash_attention(q, k, v, mask, "auto"), q, k, k)
    assert [(mask is None, lengths is None) for *_, lengths, mask in calls] == [(True, False), (False, True)]
    assert calls[1][-1].shape == (2, 1, 51, 307)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_known_mask_reaches_the_implementation_in_its_own_words(name, padded):
    one = {"causal": ab.masks.causal(), "window": ab.masks.window(3)}[name]
    mask = known(one, 6, 10)
    if padded:
        mask = mask.replace(valid=jnp.asarray(some_valid(2, 10, seed=2)).at[:, 4:].set(True))
    q, k, v = tokens(2, 6, 4, 8, seed=1), tokens(2, 10, 1, 8, seed=2), tokens(2, 10, 1, 8, seed=3)
    found = jax.jit(attention.flash_attention, static_argnums=4)(q, k, v, mask, "auto")
    wanted = standard_attention(q, k, v, mask.array(), jnp.float32)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    there = np.asarray(mask.valid) if padded else np.ones((1, 10), bool)
    np.testing.assert_array_equal(mask.array(), one.array(MaskShape(1, 1, 6, 10)) & there[:, None, None])


def test_what_differs_between_rows_is_not_known():
    with pytest.raises(InvalidWorkload, match="same for every row"):
        known(ab.masks.lengths([3, 4]), 4)
    blind = known(ab.masks.causal(), 4, 2)
    assert blind.rows_that_see().tolist() == [[False, False, True, True]]


TOKENS = 6
PATHS = [Path(True, choice, fully_masked=how) for choice in ("auto", "jax") for how in ("uniform", "zero")]


def told(path):
    return f"{path.flash_attention_impl}-{path.fully_masked}"


def on_and_off(mask, path, batch=2, q_len=TOKENS):
    """The same attention by a flash path and by the standard one."""
    q, k, v = (tokens(batch, length, n, 8, seed=n) for length, n in ((q_len, 4), (TOKENS, 2), (TOKENS, 1)))
    v = jnp.concatenate([v, v + 1], axis=2)
    return [attend(q, k, v, mask, one, jnp.float32) for one in (path, replace(path, use_flash_attention=False))]


@pytest.mark.parametrize("path", PATHS, ids=told)
@pytest.mark.parametrize("padded", [False, True])
def test_a_run_that_reaches_no_key_has_rows_without_keys(path, padded):
    valid = jnp.asarray([[1] * TOKENS, [0, 0, 1, 1, 1, 1]], bool) if padded else None
    mask = TokenMask(kv_len=TOKENS, runs=((2, 0), (4, TOKENS)), valid=valid)
    assert mask.rows_that_see().tolist() == [[False] * 2 + [True] * 4] * (2 if padded else 1)
    found, wanted = on_and_off(mask, path)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert bool((found[:, :2] == 0).all()) == (path.fully_masked == "zero")


def test_a_run_without_keys_has_finite_gradients():
    q, k = tokens(1, 4, 2, 8, seed=1), tokens(1, 4, 2, 8, seed=2)
    mask = TokenMask(kv_len=4, runs=((2, 0), (2, 4)))
    paths = (Path(), Path(True), Path(True, "jax"))
    loss = lambda k, path: (attend(q, k, k, mask, path, jnp.float32) ** 2).sum()  # noqa: E731
    wanted, *found = (jax.grad(loss)(k, path) for path in paths)
    for one in found:
        np.testing.assert_allclose(one, wanted, atol=5e-6)


@pytest.mark.parametrize("path", PATHS[::2], ids=told)
def test_padding_of_one_row_is_that_of_the_whole_batch(path):
    row = jnp.asarray([[1, 1, 0, 1, 1, 1]], bool)
    ar = jnp.asarray([0, 0, 0, 0, 1, 0])
    for mask in (in_blocks((4, 2), row), block_causal(ar, row), block_causal(jnp.stack([ar, ar]), row)):
        found, wanted = on_and_off(mask, path)
        np.testing.assert_allclose(found, wanted, atol=2e-6)
        np.testing.assert_allclose(wanted, on_and_off(in_blocks((4, 2), row.repeat(2, axis=0)), path)[1], atol=2e-6)


@pytest.mark.parametrize("path", PATHS[::2], ids=told)
def test_empty_blocks_and_runs_are_none(path):
    assert in_blocks((3, 0, 3)) == in_blocks((3, 3))
    assert in_blocks((0, 6, 0)).runs == ((6, 6),)
    for mask in (in_blocks((3, 0, 3)), TokenMask(kv_len=TOKENS, runs=((3, 3), (0, 4), (3, 6), (0, 6)))):
        found, wanted = on_and_off(mask, path)
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_queries_may_start_within_a_block():
    valid = some_valid(2, 10)
    whole = by_definition(valid, np.array([0, 0, 0, 0, 0, 0, 1, 1, 0, 0]))
    mask = in_blocks((6, 1, 3), jnp.asarray(valid), queries_from=4)
    assert mask.runs == ((2, 6), (1, 7), (3, 10))
    np.testing.assert_array_equal(mask.array()[:, 0], whole[:, 4:])


def test_padding_of_zeros_and_ones_is_padding():
    valid = some_valid(2, TOKENS)
    whole, ar = jnp.asarray(valid), jnp.asarray([0, 0, 0, 0, 1, 0])
    for made in (lambda v: in_blocks((4, 2), v), lambda v: block_causal(ar, v)):
        np.testing.assert_array_equal(made(whole.astype(int)).array(), made(whole).array())
        with pytest.raises(InvalidWorkload, match="booleans, or of 0 and 1, not of float32"):
            made(whole.astype(jnp.float32))
    for path in PATHS[::2]:
        mask = in_blocks((4, 2), whole)
        numbers = mask.replace(valid=mask.valid.astype(int), q_valid=mask.q_valid.astype(jnp.uint8))
        np.testing.assert_array_equal(on_and_off(numbers, path), on_and_off(mask, path))


@pytest.mark.parametrize("shape", [(2, 9), (2, 4), (6,), (2, 6, 1)])
def test_padding_of_other_tokens_is_refused(shape):
    valid = jnp.ones(shape, bool)
    for make in (lambda: in_blocks((4, 2), valid), lambda: block_causal(jnp.zeros(6), valid)):
        with pytest.raises(WrongMaskShape, match="valid of the attention mask must be"):
            make()


@pytest.mark.parametrize("path", [Path(), *PATHS[::2]], ids=lambda p: told(p) if p.use_flash_attention else "off")
def test_arrays_that_do_not_fit_queries_and_keys_are_refused(path):
    mask, ids = in_blocks((4, 2), jnp.ones((2, 6), bool)), block_causal(jnp.zeros(6), jnp.ones((2, 6), bool))
    wrong = {
        "valid": [mask.replace(valid=jnp.ones((3, 6), bool)), mask.replace(valid=jnp.ones((2, 7), bool))],
        "q_valid": [mask.replace(q_valid=jnp.ones((2, 4), bool))],
        "ids": [ids.replace(ids=jnp.zeros((3, 6), int)), ids.replace(ids=jnp.zeros((2, 7), int))],
        "runs": [TokenMask(kv_len=6, runs=((6, 7),)), TokenMask(kv_len=6, runs=((6, -1),))],
    }
    for name, given in wrong.items():
        for one in given:
            with pytest.raises(WrongMaskShape, match=rf"^{name} "):
                on_and_off(one, path)


def test_a_mask_has_at_least_as_many_slots_as_tokens():
    valid = jnp.ones((2, 6), bool)
    for make in (
        lambda: in_blocks((6,), kv_len=4),
        lambda: in_blocks((6,), valid, kv_len=0),
        lambda: block_causal(jnp.zeros(6), valid, 4),
    ):
        with pytest.raises(WrongMaskShape, match="kv_len must be at least the 6 tokens of the mask"):
            make()
    for sizes, start in (((), 0), ((0,), 0), ((3, -1, 2), 0), ((3, 3), 6), ((3, 3), -1)):
        with pytest.raises(InvalidWorkload, match="have no queries from"):
            in_blocks(sizes, queries_from=start)
