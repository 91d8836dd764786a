"""Block patterns: the request is met row by row, nobody is left blind, FLOPs follow the kept blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench import masks
from attnbench.errors import InvalidWorkload, UnknownName
from attnbench.masks import MaskShape
from attnbench.masks.block_patterns import PATTERNS, SPARSITIES, block_pattern, sparse_mask
from attnbench.masks.cuts import block_layout
from attnbench.spec import Workload
from attnbench.workloads import cost, suites

LENGTHS = st.integers(1, 70)


def blocks_seen(shape, size, causal):
    """[q blocks, kv blocks] by looking at every pair."""
    see = masks.causal() if causal else masks.full()
    pairs = see.array(shape)[0, 0]
    pad = [(0, -n % size) for n in pairs.shape]
    cut = np.pad(pairs, pad).reshape(-(-shape.q_len // size), size, -(-shape.kv_len // size), size)
    return cut.any(axis=(1, 3))


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(PATTERNS)), st.floats(0, 0.99), LENGTHS, LENGTHS, st.integers(1, 9), st.booleans(),
    st.integers(0, 5),
)  # fmt: skip
def test_each_row_is_within_one_block_of_the_request(pattern, sparsity, q_len, kv_len, size, causal, seed):
    shape = MaskShape(1, 2, q_len, kv_len)
    kept = block_pattern(pattern, sparsity, shape, block_size=size, causal=causal, seed=seed)
    seen = blocks_seen(shape, size, causal)
    assert not (kept & ~seen).any(), "nothing hidden is kept"
    wanted = (1 - sparsity) * seen.sum(axis=1)
    assert (np.abs(kept.sum(axis=2) - wanted) < 1).all()
    mask = sparse_mask(pattern, sparsity, shape, block_size=size, causal=causal, seed=seed)
    sighted = (masks.causal() if causal else masks.full()).array(shape).any(axis=-1)
    np.testing.assert_array_equal(mask.array(shape).any(axis=-1) | ~sighted, True)


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_achieved_sparsity_and_flops(pattern, sparsity):
    shape = MaskShape(2, 4, 2560, 2560)
    w = Workload(batch=2, q_len=2560, heads=4, head_dim=64, mask=sparse_mask(pattern, sparsity, shape, block_size=128))
    layout = block_layout(w.visible_mask, w.mask_shape)
    assert layout is not None
    assert layout.sparsity == pytest.approx(sparsity, abs=1 / 20)
    assert layout.sparsity == pytest.approx(sparsity, abs=1e-9), "20 blocks a row divide evenly"
    kept = np.broadcast_to(layout.kept, (2, 4, 20, 20)).sum()
    assert cost.demand(w).flops == kept * 128 * 128 * 4 * 64
    full = Workload(batch=2, q_len=2560, heads=4, head_dim=64)
    assert cost.demand(w).flops == round(cost.demand(full).flops * (1 - layout.sparsity))


def test_forms():
    shape = MaskShape(1, 3, 80, 80)
    local, strided, both = (
        block_pattern(name, 0.8, shape, block_size=4)[0] for name in ("local", "strided", "global_local")
    )
    assert np.flatnonzero(local[10]).tolist() == [8, 9, 10, 11]
    assert np.flatnonzero(local[0]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(strided[11]).tolist() == [1, 6, 11, 16]
    assert np.flatnonzero(both[10]).tolist() == [0, 9, 10, 11]
    assert both[:, 0].all()
    random = block_pattern("random", 0.8, shape, block_size=4)
    assert random.shape == (3, 20, 20)
    assert random[:, np.arange(20), np.arange(20)].all()
    assert not np.array_equal(random[0], random[1]), "heads differ"
    np.testing.assert_array_equal(random, block_pattern("random", 0.8, shape, block_size=4, seed=0))
    assert not np.array_equal(random, block_pattern("random", 0.8, shape, block_size=4, seed=1))


def test_no_sparsity_keeps_everything():
    shape = MaskShape(1, 2, 50, 30)
    for name in PATTERNS:
        assert block_pattern(name, 0.0, shape, block_size=8).all()


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda s: block_pattern("loca", 0.5, s), UnknownName, "Near: local"),
        (lambda s: block_pattern("local", 1.0, s), InvalidWorkload, "less than 1"),
        (lambda s: block_pattern("local", -0.1, s), InvalidWorkload, "at least 0"),
        (lambda s: block_pattern("local", math.nan, s), InvalidWorkload, "not nan"),
        (lambda s: block_pattern("local", 0.5, s, block_size=0), InvalidWorkload, "block_size"),
    ],
)
def test_wrong_requests(call, error, words):
    with pytest.raises(error, match=words):
        call(MaskShape(1, 1, 16, 16))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS, st.integers(1, 9))
def test_layout_against_the_pairs(data, batch, q_len, kv_len, size):
    shape = MaskShape(batch, 2, q_len, kv_len)
    counts = (-(-q_len // size), -(-kv_len // size))
    lead = data.draw(st.sampled_from([(), (2,), (batch, 2), (batch, 1)]))
    kept = np.random.default_rng(data.draw(st.integers(0, 99))).random((*lead, *counts)) < 0.6
    others = {
        "full": masks.full(),
        "causal": masks.causal(),
        "top-left": masks.causal("top-left"),
        "window": masks.window(5, 3),
        "prefix": masks.prefix(7),
        "lengths": masks.lengths([kv_len * (n + 1) // (batch + 1) for n in range(batch)]),
    }
    mask = masks.blocks(kept, size) & others[data.draw(st.sampled_from(sorted(others)))]
    pairs = np.broadcast_to(mask.array(shape), shape)
    assert mask.pairs(shape) == pairs.sum()
    layout = block_layout(mask, shape)
    assert layout is not None
    padded = np.pad(pairs, [(0, 0), (0, 0), (0, -q_len % size), (0, -kv_len % size)])
    cut = padded.reshape(batch, 2, counts[0], size, counts[1], size)
    have_keys = np.arange(counts[1]) * size + size <= kv_len
    real = (np.arange(counts[0] * size) < q_len).reshape(counts[0], size)
    every = (cut.all(axis=5) | ~real[None, None, :, :, None]).all(axis=3) & have_keys
    np.testing.assert_array_equal(np.broadcast_to(layout.kept, (batch, 2, *counts)), cut.any(axis=(3, 5)))
    np.testing.assert_array_equal(np.broadcast_to(layout.whole, (batch, 2, *counts)), every)
    keys = np.arange(kv_len)
    inside = (layout.low[:, None, :, None] <= keys) & (keys < layout.high[:, None, :, None])
    by_block = np.repeat(np.repeat(layout.kept, size, axis=2), size, axis=3)[:, :, :q_len, :kv_len]
    np.testing.assert_array_equal(np.broadcast_to(inside & by_block, shape), pairs)


def test_other_masks_have_no_layout():
    shape = MaskShape(1, 1, 8, 8)
    kept = masks.blocks(np.ones((2, 2), bool), 4)
    for mask in (masks.causal(), kept & kept, kept & masks.valid([True] * 8), kept & masks.dense(np.zeros((8, 8)))):
        assert block_layout(mask, shape) is None


def test_the_suite():
    found = suites.load("block-sparse").workloads
    sparse = [w for w in found if "blocks" in w.visible_mask.kinds]
    achieved = {}
    for w in sparse:
        layout = block_layout(w.visible_mask, w.mask_shape)
        assert layout is not None
        wanted = float(w.tags[1].split(" ")[0].rstrip("%")) / 100
        assert layout.sparsity == pytest.approx(wanted, abs=1 / layout.kept.shape[-1])
        achieved.setdefault((w.q_len, w.pass_), set()).add(wanted)
    for length in (2048, 4096, 16384, 32768):
        assert achieved[length, "forward"] == achieved[length, "train"] == set(SPARSITIES)
    assert {w.tags[0] for w in sparse} == set(PATTERNS)
    assert {w.visible_mask.kinds for w in sparse} == {("blocks",), ("causal", "blocks")}
    assert sum(w.inputs == "structured" for w in found) == 4
