"""Where each head's rows lie among the pieces: the part of the fused kernels' table that no address changes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from attnbench.kernels.dilated.pieces import Piece, Problem, pieces


class Strands(NamedTuple):
    """Arrays [batch, heads, branches, strands, 2]; the last axis: whole segments, the shorter one at the end."""

    piece: np.ndarray
    """Number of the piece, or -1."""
    stacked: np.ndarray
    """Place in the piece's stack of the batch row's first segment."""
    head: np.ndarray
    """Place among the piece's heads."""
    offset: np.ndarray

    @property
    def ragged(self) -> tuple[bool, ...]:
        """For each branch: whether some segment is shorter than its width."""
        return tuple(bool((self.piece[:, :, n, :, 1] >= 0).any()) for n in range(self.piece.shape[2]))


@lru_cache(maxsize=256)
def strands(problem: Problem, fold: bool, diagonal: bool, keys: bool) -> Strands:
    """Of the query heads, or of the key/value heads, whose query heads may differ in their offsets."""
    branches, heads = len(problem.pattern.segment_lengths), problem.kv_heads if keys else problem.heads
    widest = problem.heads // problem.kv_heads if keys else 1
    found = Strands(*(np.full((problem.batch, heads, branches, widest, 2), -1, np.int64) for _ in range(4)))
    for number, piece in enumerate(pieces(problem, fold, diagonal)):
        whole = problem.tokens // problem.pattern.segment_lengths[piece.branch]
        kind = 0 if piece.start == 0 and whole else 1
        for nth, head, offset in _members(piece, keys):
            slot = _slot(found.offset[:, head, piece.branch], offset)
            for row, first in _rows(piece, problem.tokens):
                at = (row, head, piece.branch, slot, kind)
                found.piece[at], found.stacked[at], found.head[at] = number, first, nth
            found.offset[:, head, piece.branch, slot] = offset
    return found


def _members(piece: Piece, keys: bool) -> list[tuple[int, int, int]]:
    """(place in the piece, head, offset) of each of its heads."""
    heads = piece.heads
    first, step, number = (
        (heads.kv_first, heads.kv_step, heads.kv_number) if keys else (heads.first, heads.step, heads.number)
    )
    return [(n, first + n * step, heads.offset + n * heads.shift) for n in range(number)]


def _slot(offsets: np.ndarray, offset: int) -> int:
    """The strand [batch, strands, 2] that has this offset, or the first that has none."""
    known = offsets[0, :, 0].tolist()
    return known.index(offset) if offset in known else known.index(-1)


def _rows(piece: Piece, tokens: int) -> list[tuple[int, int]]:
    """(batch row, place in the stack of its first segment)."""
    rows = piece.row + (piece.start + np.arange(piece.stack) * piece.apart) // tokens
    return [(int(row), int(first)) for row, first in zip(*np.unique(rows, return_index=True))]
