"""Batch rows with key lengths of their own: each run of rows of one length is worked on by itself, up to its length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attnbench.kernels.ring.transport import Pair
from attnbench.kernels.ring.work import Grads, Sums, Whole, Work

if TYPE_CHECKING:
    import torch


class LimitedWork:
    """The works of consecutive batch rows. All keys travel; those beyond a row's length are never read."""

    def __init__(self, parts: Sequence[tuple[slice, Work]]) -> None:
        self._parts = parts
        self.kernels, self.channels = parts[0][1].kernels, parts[0][1].channels

    def prepare(self, device: torch.device) -> None:
        for _, work in self._parts:
            work.prepare(device)

    def attend(self, turn: int, q: torch.Tensor, pair: Pair, sums: Sums) -> None:
        for rows, work in self._parts:
            own = [(out[rows], lse[rows]) for out, lse in sums]
            work.attend(turn, q[rows], (pair[0][rows], pair[1][rows]), own)

    def differentiate(self, turn: int, q: torch.Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        outs, lse, dout = whole
        for rows, work in self._parts:
            own = tuple(out[rows] for out in outs), lse[rows], dout[rows]
            dq, dk, dv = (grad[rows] for grad in grads)
            work.differentiate(turn, q[rows], (pair[0][rows], pair[1][rows]), own, (dq, dk, dv))


def alike(lengths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Consecutive batch rows of one length, and that length."""
    first = 0
    for length, rows in groupby(lengths):
        last = first + len(list(rows))
        yield slice(first, last), length
        first = last
