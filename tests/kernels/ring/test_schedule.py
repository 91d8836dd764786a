"""Layouts, tiles and the ring's schedule against a mask written out pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_model import idle_share

from attnbench.errors import UsageError
from attnbench.kernels.ring.schedule import (
    LAYOUTS,
    RingProblem,
    TokenRun,
    block_tiles,
    causal_tiles,
    pairs,
    positions,
    schedule,
    sizes,
)

ANY_LAYOUT = st.sampled_from(LAYOUTS)


@given(ANY_LAYOUT, st.integers(0, 60), st.integers(1, 7))
def test_every_token_has_one_place(layout, length, world):
    order = np.concatenate([positions(layout, length, world, rank) for rank in range(world)])
    assert sorted(order) == list(range(length))
    held = sizes(layout, length, world)
    assert sum(held) == length
    assert max(held) - min(held) <= (2 if layout == "zigzag" else 1)


def test_the_three_layouts():
    def held(layout):
        return [list(positions(layout, 8, 2, rank)) for rank in range(2)]

    assert held("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert held("zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert held("striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-12, 12))
def test_causal_tiles_cover_each_visible_pair_once(rows, keys, offset):
    seen = np.zeros((rows, keys), int)
    for tile in causal_tiles(rows, keys, offset):
        m, n = tile.shape
        assert m > 0
        assert n > 0
        assert m == n or not tile.causal
        seen[tile.row : tile.row_end, tile.key : tile.key_end] += np.tri(m, n, dtype=int) if tile.causal else 1
    assert (seen == np.tri(rows, keys, offset, dtype=int)).all()


def computed(problem, limit=None):
    """How often each (query, key) pair is computed by all ranks over all steps."""
    count = np.zeros((problem.q_len, problem.kv_len), int)
    for rank in range(problem.world):
        rows = positions(problem.layout, problem.q_len, problem.world, rank)
        for step in schedule(problem, rank, limit):
            keys = positions(problem.layout, problem.kv_len, problem.world, step.source)
            for tile in step.tiles:
                m, n = tile.shape
                block = np.ix_(rows[tile.row : tile.row_end], keys[tile.key : tile.key_end])
                count[block] += np.tri(m, n, dtype=int) if tile.causal else 1
    return count


@given(ANY_LAYOUT, st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_ring_computes_each_visible_pair_once(layout, q_len, kv_len, world, causal, bottom_right):
    shift = kv_len - q_len if bottom_right else 0
    problem = RingProblem(q_len, kv_len, world, layout, causal, shift)
    wanted = np.tri(q_len, kv_len, shift, dtype=int) if causal else np.ones((q_len, kv_len), int)
    assert (computed(problem) == wanted).all()
    assert sum(pairs(problem)) == wanted.sum()


@given(ANY_LAYOUT, st.integers(1, 40), st.integers(1, 5), st.booleans(), st.integers(0, 40))
def test_keys_from_a_limit_on_are_hidden(layout, tokens, world, causal, limit):
    problem = RingProblem(tokens, tokens, world, layout, causal)
    wanted = np.tri(tokens, dtype=int) if causal else np.ones((tokens, tokens), int)
    wanted[:, limit:] = 0
    assert (computed(problem, limit) == wanted).all()


@given(ANY_LAYOUT, st.integers(1, 6))
def test_each_rank_meets_each_once_and_receives_from_the_one_before(layout, world):
    problem = RingProblem(16, 16, world, layout, True)
    plans = [schedule(problem, rank) for rank in range(world)]
    for rank, plan in enumerate(plans):
        assert sorted(step.source for step in plan) == list(range(world))
        assert plan[0].source == rank
        before = plans[(rank - 1) % world]
        assert [step.source for step in plan[1:]] == [step.source for step in before[:-1]]


def test_zigzag_and_striped_balance_what_contiguous_does_not():
    shares = {layout: idle_share(RingProblem(4096, 4096, 4, layout, True)) for layout in LAYOUTS}
    assert shares["contiguous"] > 0.3
    assert shares["zigzag"] < 0.01
    assert shares["striped"] < 0.01
    spread = {layout: pairs(RingProblem(4096, 4096, 4, layout, True)) for layout in LAYOUTS}
    assert max(spread["zigzag"]) / min(spread["zigzag"]) < 1.001
    assert max(spread["contiguous"]) / min(spread["contiguous"]) > 4


def test_neighbouring_full_tiles_are_one_call():
    zigzag = schedule(RingProblem(64, 64, 4, "zigzag", True), 2)
    assert [len(step.tiles) for step in zigzag] == [3, 1, 1, 1]
    full = schedule(RingProblem(64, 64, 4, "zigzag", False), 2)
    assert [len(step.tiles) for step in full] == [1, 1, 1, 1]


def test_a_later_key_of_another_stride_is_strictly_causal():
    tiles = block_tiles([TokenRun(0, 4, 2)], [TokenRun(1, 4, 2)], causal=True)
    assert [tuple(tile) for tile in tiles] == [(1, 4, 0, 3, True)]


@pytest.mark.parametrize(
    "problem",
    [RingProblem(8, 8, 0, "zigzag", True), RingProblem(8, 8, 2, "spiral", True), RingProblem(0, 8, 2, "striped", True)],
)
def test_what_cannot_be_is_refused(problem):
    with pytest.raises(UsageError):
        schedule(problem, 0)
