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

from attnbench.impls.ring.layouts import Run
from attnbench.impls.ring.tiles import causal_tiles
from attnbench.workloads.masks import Dilated


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
    """Places of a run's tokens that an offset keeps in one segment, and the position of the first."""

    places: np.ndarray
    first: int


def calls(
    pattern: Dilated,
    heads: int,
    queries: Sequence[Run],
    keys: Sequence[Run],
    causal: bool,
) -> tuple[Call, ...]:
    """Everything that a rank's queries see of a rank's keys, each pair as often as branches let it meet."""
    found: list[Call] = []
    for branch, (width, rate) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates)):
        offsets = [int(pattern.head_offset(head, rate, heads)) for head in range(heads)]
        for offset in sorted(set(offsets)):
            members = tuple(head for head in range(heads) if offsets[head] == offset)
            found += _of_offset(branch, members, (width, rate, offset), queries, keys, causal)
    return tuple(found)


def _of_offset(
    branch: int,
    members: tuple[int, ...],
    rule: tuple[int, int, int],
    queries: Sequence[Run],
    keys: Sequence[Run],
    causal: bool,
) -> Iterator[Call]:
    mine, theirs = list(_kept(queries, rule)), list(_kept(keys, rule))
    for (run, own), other in product(zip(queries, mine), theirs):
        step = lcm(rule[1], run.stride)
        stacks: dict[tuple[int, int, int, bool], list[tuple[np.ndarray, np.ndarray]]] = {}
        for segment in sorted(own.keys() & other.keys()):
            q, k = own[segment], other[segment]
            offset = (q.first - k.first) // step if causal else len(k.places)
            for kind, tile in enumerate(causal_tiles(len(q.places), len(k.places), offset)):
                rows, columns = q.places[tile.row : tile.row_end], k.places[tile.key : tile.key_end]
                stacks.setdefault((kind, *tile.shape, tile.causal), []).append((rows, columns))
        for (_, _, _, square), stack in stacks.items():
            rows, columns = (np.stack(part) for part in zip(*stack))
            yield Call(branch, members, rows, columns, square)


def _kept(runs: Sequence[Run], rule: tuple[int, int, int]) -> Iterator[dict[int, _Kept]]:
    """For each run: segment -> what is kept of it."""
    width, rate, offset = rule
    base = 0
    for run in runs:
        places = np.nonzero((run.positions % width) % rate == offset)[0]
        positions = run.positions[places]
        segments, starts = np.unique(positions // width, return_index=True)
        parts = np.split(places + base, starts[1:])
        yield {int(s): _Kept(part, int(positions[start])) for s, part, start in zip(segments, parts, starts)}
        base += run.size
