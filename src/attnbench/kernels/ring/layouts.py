"""Which rank holds which tokens. Pure arithmetic on positions: a rank's tokens are a few runs of equal stride."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from attnbench.errors import UsageError

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


class Run(NamedTuple):
    """Tokens first, first + stride, ...: so many of them."""

    first: int
    size: int
    stride: int = 1

    @property
    def end(self) -> int:
        """Just after the last token."""
        return self.first + self.stride * (self.size - 1) + 1

    @property
    def positions(self) -> np.ndarray:
        """Global positions in order."""
        return self.first + self.stride * np.arange(self.size)


def check_layout(layout: str) -> None:
    """Raises for a layout that is not one."""
    if layout not in LAYOUTS:
        raise UsageError(f'layout "{layout}" is not one of {", ".join(LAYOUTS)}.')


def runs(layout: str, length: int, world: int, rank: int) -> tuple[Run, ...]:
    """The runs of one rank in the order it stores them, empty ones left out.

    contiguous: one chunk; zigzag: chunks r and 2n-1-r of 2n, so that each has an early and a late one; striped: every
    n-th token. Chunks differ by at most one token where the length does not divide.
    """
    check_layout(layout)
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} is not one of {world}.")
    if layout == "striped":
        found = [Run(rank, len(range(rank, length, world)), world)]
    elif layout == "contiguous":
        found = [_chunk(length, world, rank)]
    else:
        found = [_chunk(length, 2 * world, n) for n in (rank, 2 * world - 1 - rank)]
    return tuple(run for run in found if run.size)


def before(found: Sequence[Run], limit: int) -> tuple[Run, ...]:
    """Tokens of runs, in order of position, that lie before a position: the others are the last of a rank's own."""
    cut = (run._replace(size=len(range(run.first, min(limit, run.end), run.stride))) for run in found)
    return tuple(run for run in cut if run.size)


def _chunk(length: int, parts: int, n: int) -> Run:
    size, longer = divmod(length, parts)
    return Run(n * size + min(n, longer), size + (n < longer))


def positions(layout: str, length: int, world: int, rank: int) -> np.ndarray:
    """Global positions of a rank's tokens, in the order it stores them."""
    parts = [run.positions for run in runs(layout, length, world, rank)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def sizes(layout: str, length: int, world: int) -> tuple[int, ...]:
    """Tokens of each rank."""
    return tuple(sum(run.size for run in runs(layout, length, world, rank)) for rank in range(world))


def order(layout: str, length: int, world: int) -> np.ndarray:
    """Global positions of all tokens, rank after rank: what sharding puts where; its argsort undoes it."""
    return np.concatenate([positions(layout, length, world, rank) for rank in range(world)])
