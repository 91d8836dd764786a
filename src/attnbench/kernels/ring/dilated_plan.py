"""A dilated pattern between the tokens of two ranks, as dense calls. Pure: index arrays in the ranks' own numbering.

Tokens that a branch keeps of a run and a segment lie at one stride, and so do those of the other rank: along the two
the number of visible keys grows by one per row, as in a dense ring. Calls of one shape in different segments are
stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm
from typing import NamedTuple

import numpy as np

from attnbench.kernels.ring.layouts import Run
from attnbench.kernels.ring.tiles import causal_tiles
from attnbench.masks import Blocks, Dilated


class Call(NamedTuple):
    """`stack` dense calls of one shape; every row occurs once."""

    branch: int
    heads: tuple[int, ...]
    rows: np.ndarray
    """[stack, queries] places in a rank's own order."""
    keys: np.ndarray
    causal: bool

    @property
    def pairs(self) -> int:
        """Visible pairs, over the heads."""
        (stack, m), n = self.rows.shape, self.keys.shape[1]
        return len(self.heads) * stack * (m * (m + 1) // 2 if self.causal else m * n)


class _Kept(NamedTuple):
    """Places of a run's tokens that an offset keeps in one segment and block, and the position of the first."""

    places: np.ndarray
    first: int


class _Branch(NamedTuple):
    """Tokens offset, offset + rate, ... of segments of `width`, for some heads; `kept` [q blocks, k blocks] or None."""

    number: int
    width: int
    rate: int
    offset: int
    heads: tuple[int, ...]
    kept: np.ndarray | None
    block_size: int


def calls(
    pattern: Dilated,
    heads: int,
    queries: Sequence[Run],
    keys: Sequence[Run],
    causal: bool,
    blocks: Blocks | None = None,
) -> tuple[Call, ...]:
    """Everything that a rank's queries see of a rank's keys, each pair as often as branches let it meet.

    With `blocks` only pairs whose block is kept; its block mask may differ by head, not by batch row.
    """
    return tuple(call for branch in _branches(pattern, heads, blocks) for call in _calls(branch, queries, keys, causal))


def _branches(pattern: Dilated, heads: int, blocks: Blocks | None) -> Iterator[_Branch]:
    """Heads of one branch that keep the same tokens and blocks."""
    planes = [None] * heads if blocks is None else _planes(blocks, heads)
    size = 1 if blocks is None else blocks.block_size
    for number, (width, rate) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates)):
        alike: dict[tuple[int, bytes], list[int]] = {}
        for head in range(heads):
            plane = planes[head]
            key = int(pattern.head_offset(head, rate, heads)), b"" if plane is None else plane.tobytes()
            alike.setdefault(key, []).append(head)
        for (offset, _), members in alike.items():
            yield _Branch(number, width, rate, offset, tuple(members), planes[members[0]], size)


def _planes(blocks: Blocks, heads: int) -> list[np.ndarray]:
    array = blocks.block_mask.array
    array = array.reshape(-1, *array.shape[-2:])
    return [array[head if len(array) > 1 else 0] for head in range(heads)]


def _calls(branch: _Branch, queries: Sequence[Run], keys: Sequence[Run], causal: bool) -> Iterator[Call]:
    mine, theirs = list(_kept(queries, branch)), list(_kept(keys, branch))
    for (run, own), other in product(zip(queries, mine), theirs):
        step = lcm(branch.rate, run.stride)
        stacks: dict[tuple[int, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
        for place, q in sorted(own.items()):
            for nth, k in enumerate(_seen(place, other, branch)):
                offset = (q.first - k.first) // step if causal else len(k.places)
                for kind, tile in enumerate(causal_tiles(len(q.places), len(k.places), offset)):
                    rows, columns = q.places[tile.row : tile.row_end], k.places[tile.key : tile.key_end]
                    # Rows may meet several stretches of keys: each in a stack of its own, so that none has a row twice.
                    stacks.setdefault((nth, kind, *tile.shape, tile.causal), []).append((rows, columns))
        for (*_, square), stack in stacks.items():
            rows, columns = (np.stack(part) for part in zip(*stack))
            yield Call(branch.number, branch.heads, rows, columns, bool(square))


def _seen(place: tuple[int, int], other: dict[tuple[int, int], _Kept], branch: _Branch) -> Iterator[_Kept]:
    """Keys of the same segment in kept blocks; neighbouring blocks as one stretch."""
    segment, row = place
    if branch.kept is None:
        if place in other:
            yield other[place]
        return
    stretch: list[_Kept] = []
    for (where, column), kept in sorted(other.items()):
        if where != segment:
            continue
        if branch.kept[row, column]:
            stretch.append(kept)
        elif stretch:
            yield _joined(stretch)
            stretch = []
    if stretch:
        yield _joined(stretch)


def _joined(stretch: Sequence[_Kept]) -> _Kept:
    return _Kept(np.concatenate([one.places for one in stretch]), stretch[0].first)


def _kept(runs: Sequence[Run], branch: _Branch) -> Iterator[dict[tuple[int, int], _Kept]]:
    """For each run: (segment, block) -> what is kept of it; blocks are not told apart where there is no block mask."""
    base = 0
    for run in runs:
        places = np.nonzero((run.positions % branch.width) % branch.rate == branch.offset)[0]
        positions = run.positions[places]
        block = positions // branch.block_size if branch.kept is not None else np.zeros_like(positions)
        groups, starts = np.unique(np.stack([positions // branch.width, block]), axis=1, return_index=True)
        parts = np.split(places + base, starts[1:])
        yield {
            (int(s), int(b)): _Kept(part, int(positions[start])) for s, b, part, start in zip(*groups, parts, starts)
        }
        base += run.size
