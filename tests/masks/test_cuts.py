"""A mask cut into pieces: together they show exactly what the mask shows, and what cannot be cut says why."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench import masks
from attnbench.masks import Causal, Full, Lengths, MaskShape
from attnbench.masks.cuts import pieces

SHAPE = MaskShape(2, 3, 24, 24)
PI0 = np.repeat([0, 1, 2], [816, 1, 50])


def shown(cut, shape):
    """The array that the pieces make up."""
    found = np.zeros(tuple(shape), bool)
    for start, stop, first, last, mask in cut:
        part = mask.array(MaskShape(shape.batch, shape.heads, stop - start, last - first))
        found[:, :, start:stop, first:last] = part
    return found


@pytest.mark.parametrize(
    "mask, count",
    [
        (masks.block_causal(np.repeat([0, 1, 2], [16, 1, 7])), 3),
        (masks.block_causal(np.repeat([0, 1, 2, 3], [16, 1, 1, 6])), 4),
        (masks.block_causal(np.tile(np.repeat([0, 1], [20, 4]), (2, 1))), 2),
        (masks.documents(np.repeat([0, 1, 2], [9, 10, 5])), 3),
        (masks.documents(np.repeat([0, 1], [9, 15])) & masks.causal(), 2),
        (masks.prefix(10), 2),
        (masks.causal(), 1),
        (masks.full(), 1),
        (masks.block_causal(np.repeat([0, 1], [20, 4])) & masks.lengths([24, 17]), 2),
        (masks.block_causal(np.repeat([0, 1], [20, 4])) & masks.lengths([24, 22]), 2),
    ],
    ids=lambda one: one if isinstance(one, int) else one.id,
)
def test_pieces_show_what_the_mask_shows(mask, count):
    cut = pieces(mask, SHAPE, 8)
    assert not isinstance(cut, str), cut
    assert len(cut) == count
    assert [one.start for one in cut[1:]] == [one.stop for one in cut[:-1]]
    assert np.array_equal(shown(cut, SHAPE), np.broadcast_to(mask.array(SHAPE), tuple(SHAPE)))


def test_pi0_is_three_calls_without_a_mask():
    cut = pieces(masks.block_causal(PI0), MaskShape(32, 8, 867, 867), 8)
    assert [(*one[:4], type(one.mask)) for one in cut] == [
        (0, 816, 0, 816, Full), (816, 817, 0, 817, Full), (817, 867, 0, 867, Full),
    ]  # fmt: skip


def test_a_denoise_step_is_its_last_two_blocks():
    cut = pieces(masks.block_causal(PI0), MaskShape(1, 8, 51, 867), 8)
    assert [one[:4] for one in cut] == [(0, 1, 0, 817), (1, 51, 0, 867)]


def test_blocks_of_one_token_are_calls_without_a_mask_while_they_are_few():
    few = pieces(masks.block_causal(np.repeat([0, 1, 2], [22, 1, 1])), SHAPE, 8)
    assert {type(one.mask) for one in few} == {Full}
    many = pieces(masks.block_causal([0] * 10 + list(range(1, 15))), SHAPE, 8)
    assert [type(one.mask) for one in many] == [Full, Causal]


def test_lengths_that_end_behind_a_piece_are_no_part_of_it():
    first, second = pieces(masks.block_causal(np.repeat([0, 1], [20, 4])) & masks.lengths([24, 22]), SHAPE, 8)
    assert isinstance(first.mask, Full)
    assert isinstance(second.mask, Lengths)
    assert second.mask.kv_lengths.array.tolist() == [24, 22]


@pytest.mark.parametrize(
    "mask, why",
    [
        (masks.window(3), "at most 8 blocks"),
        (masks.block_causal(np.repeat(np.arange(12), 2)), "at most 8 blocks"),
        (masks.block_causal([[0] * 12 + [1] * 12, [0] * 14 + [1] * 10]), "batch rows with the same mask"),
        (masks.block_causal(np.array([1, 0] * 12)), "one run of keys"),
        (masks.valid(np.arange(24) % 5 > 0), "one run of keys"),
        (masks.dense(np.zeros((24, 24), np.float32)), "one run of keys"),
        (masks.block_causal(np.repeat([1, 2], 12), np.repeat([0, 1, 2], 8)), "see no key"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.id,
)
def test_what_cannot_be_cut_says_why(mask, why):
    assert why in str(pieces(mask, SHAPE, 8))


def test_a_million_rows_are_cut_at_once():
    shape = MaskShape(1, 1, 1 << 20, 1 << 20)
    assert len(pieces(masks.prefix(1 << 19), shape, 8)) == 2
    assert isinstance(pieces(masks.window(128), shape, 8), str)
