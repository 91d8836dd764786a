"""Every mask against a brute-force predicate written here from the semantics alone, not from the code under test."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench import masks
from attnbench.errors import InvalidWorkload
from attnbench.masks import AnyMask, MaskShape
from attnbench.masks.large_bias import shifted
from attnbench.spec import Workload

ALIGNS = ("bottom-right", "top-left")


def position(i, shape, align):
    return i + (shape.kv_len - shape.q_len if align == "bottom-right" else 0)


def by_hand(see, shape: MaskShape) -> np.ndarray:
    seen = np.zeros(shape, bool)
    for b, h, i, j in product(*(range(n) for n in shape)):
        seen[b, h, i, j] = see(b, h, i, j)
    return seen


def check(mask, shape: MaskShape, see) -> None:
    mask.check(shape)
    want = by_hand(see, shape)
    np.testing.assert_array_equal(np.broadcast_to(mask.array(shape), shape), want)
    assert mask.pairs(shape) == want.sum()
    for interval in (mask.interval(shape), mask.runs(shape)):
        if interval is not None:
            low, high = (np.broadcast_to(edge, (shape.batch, shape.q_len))[:, None, :, None] for edge in interval)
            keys = np.arange(shape.kv_len)
            np.testing.assert_array_equal(np.broadcast_to((low <= keys) & (keys < high), shape), want)
    if (runs := mask.runs(shape)) is not None:
        assert (runs[0] >= 0).all()
        assert (runs[0] <= runs[1]).all()
        assert (runs[1] <= shape.kv_len).all()


sizes = st.builds(MaskShape, st.integers(1, 3), st.integers(1, 4), st.integers(1, 13), st.integers(1, 13))
aligns = st.sampled_from(ALIGNS)
sides = st.none() | st.integers(0, 15)


def paper_slopes(heads):
    """As the paper writes them: a geometric sequence that starts at 2 ** (-8 / n) and has that as its ratio."""

    def powers(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return powers(heads)
    near = 2 ** math.floor(math.log2(heads))
    return powers(near) + powers(2 * near)[0::2][: heads - near]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 40, 112])
def test_the_slopes_of_the_paper(heads):
    mask = masks.alibi(heads)
    np.testing.assert_allclose(mask.slopes.array, paper_slopes(heads), rtol=1e-6)
    assert mask == masks.alibi(mask.slopes.array)
    assert mask.title == "alibi"


@given(sizes, aligns, st.data())
def test_alibi(shape, align, data):
    slopes = data.draw(st.lists(st.floats(0, 4, width=32), min_size=shape.heads, max_size=shape.heads))
    mask = masks.alibi(slopes, align)
    check(mask, shape, lambda b, h, i, j: True)
    want = np.zeros(shape)
    for b, h, i, j in product(*(range(n) for n in shape)):
        want[b, h, i, j] = -slopes[h] * abs(position(i, shape, align) - j)
    np.testing.assert_allclose(np.broadcast_to(mask.bias(shape), shape), want, rtol=1e-6)
    both = mask & masks.causal(align) & mask
    check(both, shape, lambda b, h, i, j: j <= position(i, shape, align))
    np.testing.assert_allclose(
        np.broadcast_to(both.bias(shape), shape), np.where(by_hand_causal(shape, align), 2 * want, -np.inf), rtol=1e-6
    )


def by_hand_causal(shape, align):
    return by_hand(lambda b, h, i, j: j <= position(i, shape, align), shape)


@given(sizes, aligns)
def test_full_and_causal(shape, align):
    check(masks.full(), shape, lambda b, h, i, j: True)
    check(masks.causal(align), shape, lambda b, h, i, j: j <= position(i, shape, align))


@given(sizes, sides, sides, aligns)
def test_window(shape, left, right, align):
    def see(b, h, i, j):
        i = position(i, shape, align)
        return (left is None or i - left <= j) and (right is None or j <= i + right)

    check(masks.window(left, right, align), shape, see)


@given(sizes, st.integers(0, 15), aligns)
def test_prefix(shape, n, align):
    check(masks.prefix(n, align), shape, lambda b, h, i, j: j < n or j <= position(i, shape, align))


@given(st.data(), sizes, st.booleans(), st.booleans())
def test_block_causal_and_documents(data, shape, sort, own_queries):
    def draw_ids(length):
        rows = data.draw(st.sampled_from([1, shape.batch]))
        ids = np.array(data.draw(st.lists(st.integers(0, 3), min_size=rows * length, max_size=rows * length)))
        ids = ids.reshape(rows, length)
        return np.sort(ids, axis=1) if sort else ids

    ids = draw_ids(shape.kv_len)
    q_ids = draw_ids(shape.q_len) if own_queries or shape.q_len > shape.kv_len else None
    queries = ids[:, shape.kv_len - shape.q_len :] if q_ids is None else q_ids
    key = lambda b, j: ids[b % len(ids), j]  # noqa: E731
    query = lambda b, i: queries[b % len(queries), i]  # noqa: E731
    check(masks.block_causal(ids, q_ids), shape, lambda b, h, i, j: key(b, j) <= query(b, i))
    check(masks.documents(ids, q_ids), shape, lambda b, h, i, j: key(b, j) == query(b, i))


def test_block_causal_is_openpis_mask():
    # What openpi's make_attn_mask does for pi0: prefix 0, state 1, first action 1, other actions 0.
    mask_ar = np.array([0] * 6 + [1] + [1, 0, 0])
    running = np.cumsum(mask_ar)
    shape = MaskShape(1, 1, 10, 10)
    want = running[None, :] <= running[:, None]
    np.testing.assert_array_equal(masks.block_causal(running).array(shape)[0, 0], want)
    assert want[0].sum() == 6
    assert want[6].sum() == 7
    assert want[7].sum() == 10


@given(st.data(), sizes)
def test_lengths_and_valid(data, shape):
    kv_lengths = data.draw(st.lists(st.integers(0, shape.kv_len), min_size=shape.batch, max_size=shape.batch))
    check(masks.lengths(kv_lengths), shape, lambda b, h, i, j: j < kv_lengths[b])
    rows = data.draw(st.sampled_from([1, shape.batch]))
    keys = np.array(data.draw(st.lists(st.booleans(), min_size=rows * shape.kv_len, max_size=rows * shape.kv_len)))
    keys = keys.reshape(rows, shape.kv_len)
    check(masks.valid(keys), shape, lambda b, h, i, j: keys[b % rows, j])


def count_by_hand(segments, rates, offset, heads, h, i, j) -> int:
    count = 0
    for w, r in zip(segments, rates):
        start = h % r if offset == "mod" else h // math.ceil(heads / r)
        if i // w == j // w:
            segment = range(i // w * w, i // w * w + w)
            kept = [token for place, token in enumerate(segment) if place >= start and (place - start) % r == 0]
            count += i in kept and j in kept
    return count


branches = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(branches, st.sampled_from(["mod", "group"]), st.integers(1, 5), st.integers(1, 14), st.booleans())
def test_dilated(found, offset, heads, tokens, causal):
    segments, rates = zip(*found)
    shape = MaskShape(2, heads, tokens, tokens)
    mask = masks.dilated(segments, rates, offset)
    count = lambda h, i, j: count_by_hand(segments, rates, offset, heads, h, i, j)  # noqa: E731
    if causal:
        check(masks.causal() & mask, shape, lambda b, h, i, j: count(h, i, j) > 0 and j <= i)
    else:
        check(mask, shape, lambda b, h, i, j: count(h, i, j) > 0)
    bias = np.broadcast_to(mask.bias(shape), shape)
    for h, i, j in product(range(heads), range(tokens), range(tokens)):
        n = count(h, i, j)
        assert bias[0, h, i, j] == pytest.approx(math.log(n) if n else -math.inf)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.sampled_from([(2, 1), (3, 2), (4, 3), (6, 4)]), min_size=1, max_size=3), st.booleans())
def test_dilated_pairs_over_many_periods_and_with_lengths(data, found, causal):
    """Counted a period at a time where rows count alike, row by row where lengths cut them."""
    segments, rates = zip(*found)
    tokens = data.draw(st.integers(1, 60))
    mask = masks.dilated(segments, rates)
    mask = masks.causal() & mask if causal else mask
    lengths = data.draw(st.none() | st.lists(st.integers(0, tokens), min_size=2, max_size=2))
    mask = mask if lengths is None else mask & masks.lengths(lengths)
    shape = MaskShape(2, 3, tokens, tokens)
    assert mask.pairs(shape) == np.broadcast_to(mask.array(shape), shape).sum()


@given(st.data(), sizes, st.integers(1, 5))
def test_blocks(data, shape, size):
    counts = [-(-n // size) for n in shape[2:]]
    lead = data.draw(st.sampled_from([(), (1,), (shape.heads,), (1, shape.heads), (shape.batch, 1), shape[:2]]))
    full = (*lead, *counts)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=math.prod(full), max_size=math.prod(full)))).reshape(
        full
    )
    axes = kept.reshape((1,) * (4 - kept.ndim) + kept.shape)
    see = lambda b, h, i, j: axes[b % axes.shape[0], h % axes.shape[1], i // size, j // size]  # noqa: E731
    check(masks.blocks(kept, size), shape, see)


@given(st.data(), sizes)
def test_dense_boolean_and_additive(data, shape):
    axes = tuple(data.draw(st.sampled_from([1, n])) for n in shape)
    elements = st.lists(
        st.sampled_from([-math.inf, 0.0, 1.5, -2.0]), min_size=math.prod(axes), max_size=math.prod(axes)
    )
    bias = np.array(data.draw(elements)).reshape(axes)
    at = lambda b, h, i, j: bias[b % axes[0], h % axes[1], i % axes[2], j % axes[3]]  # noqa: E731
    check(masks.dense(bias > -math.inf), shape, lambda b, h, i, j: at(b, h, i, j) > -math.inf)
    check(masks.dense(bias), shape, lambda b, h, i, j: at(b, h, i, j) > -math.inf)
    np.testing.assert_array_equal(np.broadcast_to(masks.dense(bias).bias(shape), shape), np.broadcast_to(bias, shape))


SHAPE = MaskShape(2, 4, 12, 12)
RNG = np.random.default_rng(5)
PARTS = {
    "causal": masks.causal(),
    "window": masks.window(4, 1),
    "prefix": masks.prefix(3),
    "block_causal": masks.block_causal(np.cumsum(RNG.integers(0, 2, 12))),
    "documents": masks.documents(np.repeat([0, 1, 2], 4)),
    "lengths": masks.lengths([12, 5]),
    "valid": masks.valid(RNG.random((2, 12)) < 0.7),
    "dilated": masks.dilated([4, 12], [1, 3]),
    "alibi": masks.alibi([0.5, 0.25, 0.0, 3.0]),
    "blocks": masks.blocks(RNG.random((4, 3, 3)) < 0.6, 4),
    "dense": masks.dense(RNG.random((1, 1, 12, 12)) < 0.6),
    "bias": masks.dense(RNG.standard_normal((2, 4, 12, 12))),
}


@pytest.mark.parametrize("names", [pair for pair in product(PARTS, PARTS) if pair[0] < pair[1]], ids="&".join)
def test_both_sees_what_each_sees_and_weights_add(names):
    a, b = (PARTS[name] for name in names)
    both = a & b
    want = np.broadcast_to(a.array(SHAPE), SHAPE) & np.broadcast_to(b.array(SHAPE), SHAPE)
    np.testing.assert_array_equal(np.broadcast_to(both.array(SHAPE), SHAPE), want)
    assert both.pairs(SHAPE) == want.sum()
    np.testing.assert_allclose(both.bias(SHAPE), a.bias(SHAPE) + b.bias(SHAPE), rtol=1e-12)
    assert both.id == f"{a.id}&{b.id}"


def test_three_combine_flat_and_full_disappears():
    three = masks.causal() & masks.lengths([3, 9]) & masks.dilated([4, 12], [1, 3])
    assert three.kinds == ("causal", "lengths", "dilated")
    assert three.pairs(SHAPE) == np.broadcast_to(three.array(SHAPE), SHAPE).sum()
    assert (masks.full() & masks.causal()) == masks.causal()
    assert (masks.full() & masks.full()) == masks.full()


@pytest.mark.parametrize("name", PARTS)
def test_json_round_trip(name):
    for mask in (PARTS[name], PARTS[name] & masks.window(3)):
        back = msgspec.json.decode(msgspec.json.encode(mask), type=AnyMask)
        assert back == mask
        assert back.id == mask.id
        assert hash(back) == hash(mask)


@pytest.mark.parametrize("name", PARTS)
def test_given_rows_are_the_rows_of_the_whole(name):
    rows = np.array([7, 2])
    np.testing.assert_array_equal(PARTS[name].array(SHAPE, rows), PARTS[name].array(SHAPE)[:, :, rows])
    np.testing.assert_array_equal(PARTS[name].bias(SHAPE, rows), PARTS[name].bias(SHAPE)[:, :, rows])


@pytest.mark.torch
@pytest.mark.parametrize("name", PARTS)
def test_predicate_under_torch_vmap(name):
    """FlexAttention evaluates a mask_mod on scalar index tensors under vmap: the same must work here."""
    torch = pytest.importorskip("torch")
    mask = PARTS[name] & masks.window(9, 9)
    index = [torch.arange(n) for n in SHAPE]

    def over_all(function):
        for axis in (3, 2, 1, 0):
            function = torch.vmap(function, in_dims=tuple(0 if n == axis else None for n in range(4)))
        return function(*index).numpy()

    np.testing.assert_array_equal(over_all(mask.predicate(SHAPE, torch)), np.broadcast_to(mask.array(SHAPE), SHAPE))
    weight = mask.log_weight(SHAPE, torch)
    if weight is not None:
        seen = np.broadcast_to(mask.array(SHAPE), SHAPE)
        np.testing.assert_allclose(over_all(weight)[seen], np.broadcast_to(mask.bias(SHAPE), SHAPE)[seen], rtol=1e-6)


@pytest.mark.jax
@pytest.mark.parametrize("name", PARTS)
def test_predicate_under_jit(name):
    jax = pytest.importorskip("jax")
    mask = PARTS[name] & masks.window(9, 9)
    index = [np.asarray(i, np.int32) for i in np.broadcast_arrays(*mask.indices(SHAPE))]
    seen = np.asarray(jax.jit(mask.predicate(SHAPE, jax.numpy))(*index))
    np.testing.assert_array_equal(seen, mask.array(SHAPE))
    weight = mask.log_weight(SHAPE, jax.numpy)
    if weight is not None:
        found = np.asarray(jax.jit(weight)(*index))
        np.testing.assert_allclose(found[seen], mask.bias(SHAPE)[seen], rtol=1e-5, atol=1e-6)


def test_ids_are_pinned():
    """Run files, baselines and policies are keyed by these: a change here orphans all of them."""
    ids = {
        "full": masks.full(),
        "causal": masks.causal(),
        "causal-topleft": masks.causal("top-left"),
        "window128:0": masks.window(128),
        "windowall:5-topleft": masks.window(None, 5, "top-left"),
        "prefix816": masks.prefix(816),
        "dilated2048r1+4096r2": masks.dilated([2048, 4096], [1, 2]),
        "dilated8r2-group": masks.dilated([8], [2], "group"),
        "alibi-e728c950": masks.alibi(4),
        "alibi-e728c950-topleft": masks.alibi([2**-2, 2**-4, 2**-6, 2**-8], "top-left"),
        "blockcausal-ccd9e215": masks.block_causal([0, 0, 1, 2]),
        "documents-82402712+bb2e4214": masks.documents([0, 0, 1], [1]),
        "lengths-b92df513": masks.lengths([3, 0]),
        "valid-a552cccf": masks.valid([True, False, True]),
        "blocks16-9f886708": masks.blocks([[True, False]], 16),
        "bias-fe06a080": masks.dense(np.float32([[0.5, 1.0]])),
    }
    assert [mask.id for mask in ids.values()] == list(ids)


def test_dense_takes_bfloat16_of_both_frameworks():
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    values = [[0.5, 1.25]]
    want = masks.dense(np.float32(values))
    assert masks.dense(torch.tensor(values, dtype=torch.bfloat16)) == want
    assert masks.dense(jnp.asarray(values, jnp.bfloat16)) == want


BAD = [
    (lambda: masks.causal("middle"), 'align must be "bottom-right" or "top-left"'),
    (lambda: masks.window(-1), "0 or more keys"),
    (lambda: masks.prefix(-1), "0 or more keys"),
    (lambda: masks.lengths([1.5, 2.0]), "whole numbers"),
    (lambda: masks.lengths([1, 2, 3]).check(SHAPE), "has 3 batch rows, the workload has 2"),
    (lambda: masks.lengths([1, 13]).check(SHAPE), "0 ... 12"),
    (lambda: masks.valid([0, 1]), "booleans"),
    (lambda: masks.valid([True] * 5).check(SHAPE), "covers 5 tokens, kv_len is 12"),
    (lambda: masks.block_causal([0] * 12).check(SHAPE._replace(q_len=14)), "needs q_ids"),
    (lambda: masks.documents(np.zeros((3, 12), int)).check(SHAPE), "3 batch rows"),
    (lambda: masks.documents([2**40] * 12), "32 bits"),
    (lambda: masks.dilated([4], [1, 2]), "as many dilation rates"),
    (lambda: masks.alibi([0.5, -0.5]), "finite and 0 or more"),
    (lambda: masks.alibi([0.5, np.inf]), "finite and 0 or more"),
    (lambda: masks.alibi([[0.5]]), "2 axes"),
    (lambda: masks.alibi(0), "at least 1"),
    (lambda: masks.alibi(True), "whole number"),
    (lambda: masks.alibi(["a"]), "numbers"),
    (lambda: masks.alibi(SHAPE.heads + 1).check(SHAPE), "slopes, the workload has"),
    (lambda: masks.alibi(2, "middle"), "align must be"),
    (lambda: masks.dilated([4], [0]), "at least 1"),
    (lambda: masks.dilated([4], [2], "both"), '"mod" (the paper) or "group"'),
    (lambda: masks.dilated([4], [2]).check(SHAPE._replace(kv_len=13)), "self-attention"),
    (lambda: masks.blocks([[1, 0]], 4), "booleans"),
    (lambda: masks.blocks([[True]], 4).check(SHAPE), "3 x 3 blocks of 4"),
    (lambda: masks.blocks([[True]], 0).check(SHAPE), "block_size must be at least 1"),
    (lambda: masks.dense([[0, 1]]), "ambiguous"),
    (lambda: masks.dense([[math.nan]]), "NaN"),
    (lambda: masks.dense(np.zeros((5, 5))).check(SHAPE), "does not broadcast"),
    (lambda: masks.dense([[1.0], [1.0, 2.0]]), "must be"),
]


@pytest.mark.parametrize("make,words", BAD, ids=[words for _, words in BAD])
def test_bad_input_says_what_is_wrong(make, words):
    with pytest.raises(InvalidWorkload) as caught:
        make()
    assert words in str(caught.value)


def test_big_masks_are_counted_without_the_pairs():
    million = 1 << 20
    shape = MaskShape(1, 2, million, million)
    assert masks.causal().pairs(shape) == 2 * million * (million + 1) // 2
    assert masks.window(4095).pairs(shape) == 2 * (million * 4096 - 4096 * 4095 // 2)
    assert masks.dilated([2048, 4096], [1, 2]).pairs(shape) > 0


def test_titles_say_what_ids_only_name():
    many = list(range(9))
    titles = {
        "causal": masks.causal(),
        "block_causal 5, 1, 2": masks.block_causal([0] * 5 + [1] + [4] * 2),
        "documents 2, 3": masks.documents([7, 7, 8, 8, 8]),
        "lengths 3, 0": masks.lengths([3, 0]),
        "causal&lengths 4": masks.causal() & masks.lengths([4, 4]),
    }
    assert [mask.title for mask in titles.values()] == list(titles)
    for mask in (
        masks.block_causal(many),
        masks.lengths(many),
        masks.block_causal([1, 0]),
        masks.documents([[0], [1]]),
    ):
        assert mask.title == mask.id, "too many to list, not consecutive, or rows that differ"
    dropped = masks.blocks([[True, False], [False, False]], 64)
    assert dropped.title == f"{dropped.id} (75 % of the blocks dropped)"
    named = titles["block_causal 5, 1, 2"]
    assert named.title in Workload(batch=1, q_len=8, heads=1, head_dim=8, mask=named).title


@pytest.mark.torch
def test_a_mask_that_wants_gradients_is_refused_where_they_are_recorded():
    torch = pytest.importorskip("torch")
    bias = torch.zeros(5, 7, requires_grad=True)
    with pytest.raises(InvalidWorkload, match=r"constant .* pass it with \.detach\(\)"):
        masks.dense(bias)
    with torch.no_grad():
        assert masks.dense(bias) == masks.dense(bias.detach())


FLOAT32_LEAST = float(np.finfo(np.float32).min)


def test_a_large_bias_is_without_what_it_adds_to_whole_rows():
    """Of what the row sees: a large bias of a hidden key changes nothing, and rows without one stay as they are."""
    values = np.array([[5.0, 1e300, 0.0], [-1e9, -1e9 + 3, 2e300], [1.0, 2.0, -1e300], [1e300, -1e300, 0.0]])
    shape = MaskShape(1, 1, 4, 3)
    seen = np.array([[1, 0, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)
    found = shifted(masks.dense(values) & masks.dense(seen), shape, np.float32)
    assert found is not None
    assert found.top.tolist() == [[[0.0, np.float32(-1e9 + 3), 0.0, np.finfo(np.float32).max]]]
    np.testing.assert_array_equal(
        found.weight[0, 0],
        [[5, 0, 0], [-3, 0, 0], [1, 2, FLOAT32_LEAST], [0, FLOAT32_LEAST, FLOAT32_LEAST]],
    )
    assert shifted(masks.dense(np.full((4, 3), 60.0)), shape, np.float32) is None
    assert (
        shifted(masks.dense(np.full((4, 3), 60.0)) & masks.dense(np.full((4, 3), 5.0)), shape, np.float32) is not None
    )
    assert shifted(masks.causal(), shape, np.float32) is None


def test_biases_of_float32_add_up_in_float64():
    one, other = (np.random.default_rng(n).standard_normal((5, 5)).astype(np.float32) for n in range(2))
    shape, mask = MaskShape(1, 1, 5, 5), masks.dense(one) & masks.dense(other) & masks.causal()
    want = np.where(np.tri(5, dtype=bool), one.astype(np.float64) + other.astype(np.float64), -np.inf)
    np.testing.assert_array_equal(mask.bias(shape)[0, 0], want)


@pytest.mark.torch
def test_two_biases_of_float32_with_inputs_of_float64():
    import torch

    import attnbench as ab

    one, other = (np.random.default_rng(n).standard_normal((5, 5)).astype(np.float32) for n in range(2))
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.float64) for _ in range(3))
    both = masks.dense(one.astype(np.float64) + other.astype(np.float64))
    for impl in ("torch.eager", "torch.sdpa-flash"):
        found = [ab.attention(q, k, v, mask=m, impl=impl) for m in (masks.dense(one) & masks.dense(other), both)]
        torch.testing.assert_close(*found, rtol=0, atol=1e-14)


@pytest.mark.parametrize("lengths", [[True, False], np.array([True])], ids=str)
def test_booleans_are_no_lengths(lengths):
    with pytest.raises(InvalidWorkload, match="numbers of keys, not booleans"):
        masks.lengths(lengths)
