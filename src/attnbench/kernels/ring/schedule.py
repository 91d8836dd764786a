"""The plan of a ring before anything is computed: which rank holds which tokens, and which pairs it computes per step.

Pure arithmetic. A rank's tokens are a few runs of equal stride, so that the visible pairs of two ranks are rectangles
that are full and squares that are causal. Every kernel with a partial form can compute those two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from attnbench.errors import UsageError

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


class Run(NamedTuple):
    """`size` tokens at positions first, first + stride, ..."""

    first: int
    size: int
    stride: int = 1

    @property
    def end(self) -> int:
        """Position just after the last token."""
        return self.first + self.stride * (self.size - 1) + 1

    @property
    def positions(self) -> np.ndarray:
        """Global positions in order."""
        return self.first + self.stride * np.arange(self.size)


def check_layout(layout: str) -> None:
    """Raise UsageError for an unknown layout."""
    if layout not in LAYOUTS:
        raise UsageError(f'layout "{layout}" is not one of {", ".join(LAYOUTS)}.')


def runs(layout: str, length: int, world: int, rank: int) -> tuple[Run, ...]:
    """Return the runs of one rank in the order it stores them, without empty ones.

    contiguous: one chunk; zigzag: chunks r and 2n-1-r of 2n, so that each rank has an early and a late chunk; striped:
    every n-th token. If the length does not divide, chunks differ by at most one token.
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


def _chunk(length: int, parts: int, n: int) -> Run:
    size, longer = divmod(length, parts)
    return Run(n * size + min(n, longer), size + (n < longer))


def before(found: Sequence[Run], limit: int) -> tuple[Run, ...]:
    """Return the tokens of ordered runs that lie before position `limit`; a rank stores the dropped ones last."""
    cut = (run._replace(size=len(range(run.first, min(limit, run.end), run.stride))) for run in found)
    return tuple(run for run in cut if run.size)


def positions(layout: str, length: int, world: int, rank: int) -> np.ndarray:
    """Return the global positions of a rank's tokens, in the order it stores them."""
    parts = [run.positions for run in runs(layout, length, world, rank)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def sizes(layout: str, length: int, world: int) -> tuple[int, ...]:
    """Count the tokens of each rank."""
    return tuple(sum(run.size for run in runs(layout, length, world, rank)) for rank in range(world))


class Problem(NamedTuple):
    """A sharded sequence. If `causal`, query i sees keys up to i + shift."""

    q_len: int
    kv_len: int
    world: int
    layout: str
    causal: bool
    shift: int = 0

    def check(self) -> None:
        """Raise UsageError if no ring can have this shape."""
        check_layout(self.layout)
        if self.world < 1:
            raise UsageError(f"a ring has at least 1 rank, not {self.world}.")
        if min(self.q_len, self.kv_len) < 1:
            raise UsageError("a ring needs at least one query and one key.")

    def q_sizes(self) -> tuple[int, ...]:
        """Count the queries of each rank."""
        return sizes(self.layout, self.q_len, self.world)

    def kv_sizes(self) -> tuple[int, ...]:
        """Count the keys of each rank."""
        return sizes(self.layout, self.kv_len, self.world)


class Tile(NamedTuple):
    """Rows [row, row_end) of the queries against keys [key, key_end), in a rank's own numbering."""

    row: int
    row_end: int
    key: int
    key_end: int
    causal: bool = False
    """A square in which row n sees keys up to n, counted within the tile; otherwise every row sees every key."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.row_end - self.row, self.key_end - self.key

    @property
    def pairs(self) -> int:
        """Number of visible pairs."""
        rows, keys = self.shape
        return rows * (rows + 1) // 2 if self.causal else rows * keys


def causal_tiles(rows: int, keys: int, offset: int) -> list[Tile]:
    """Return tiles that cover exactly the pairs with key <= row + offset."""
    first = max(0, -offset)
    """First row that sees a key."""
    left = min(max(0, offset), keys)
    """Number of keys that every row sees, without the last of them, which begins the diagonal."""
    last = min(max(first, keys - offset), rows)
    """First row that sees every key."""
    found = [
        Tile(first, last, 0, left),
        Tile(first, last, left, last + offset, causal=True),
        Tile(max(first, last), rows, 0, keys),
    ]
    return [tile for tile in found if min(tile.shape) > 0]


def block_tiles(queries: Sequence[Run], keys: Sequence[Run], causal: bool, shift: int = 0) -> tuple[Tile, ...]:
    """Return tiles of a rank's queries against a rank's keys; query i sees key j if j <= i + shift or not `causal`.

    Runs of both sides have one stride, so that along a pair of runs the number of visible keys grows by one per row.
    """
    found: list[Tile] = []
    row = 0
    for q in queries:
        key = 0
        for k in keys:
            offset = (q.first + shift - k.first) // q.stride if causal else k.size
            for t in causal_tiles(q.size, k.size, offset):
                found.append(Tile(t.row + row, t.row_end + row, t.key + key, t.key_end + key, t.causal))
            key += k.size
        row += q.size
    return tuple(_joined(found))


def _joined(tiles: Iterable[Tile]) -> list[Tile]:
    """Join full tiles that lie side by side: one kernel call instead of two."""
    done: list[Tile] = []
    for tile in tiles:
        while (neighbour := next((other for other in done if _union(other, tile)), None)) is not None:
            done.remove(neighbour)
            tile = _union(neighbour, tile) or tile
        done.append(tile)
    return done


def _union(a: Tile, b: Tile) -> Tile | None:
    """Return the rectangle that two full tiles make together, or None if they make none."""
    if a.causal or b.causal:
        return None
    same_rows, same_keys = (a.row, a.row_end) == (b.row, b.row_end), (a.key, a.key_end) == (b.key, b.key_end)
    if not (same_rows and a.key_end == b.key) and not (same_keys and a.row_end == b.row):
        return None
    return Tile(a.row, b.row_end, a.key, b.key_end)


class Step(NamedTuple):
    """One turn of the ring for one rank."""

    source: int
    """Rank whose keys and values are here in this turn."""
    tiles: tuple[Tile, ...]
    """Visible pairs, none if the rank's queries see no key of the source."""


def schedule(problem: Problem, rank: int, limit: int | None = None) -> tuple[Step, ...]:
    """Return the steps of one rank; keys from position `limit` on are hidden.

    Everything moves to the next rank, so at step s the keys of rank - s are here.
    """
    problem.check()
    queries = runs(problem.layout, problem.q_len, problem.world, rank)
    steps = []
    for turn in range(problem.world):
        source = (rank - turn) % problem.world
        keys = runs(problem.layout, problem.kv_len, problem.world, source)
        keys = keys if limit is None else before(keys, limit)
        steps.append(Step(source, block_tiles(queries, keys, problem.causal, problem.shift)))
    return tuple(steps)


def pairs(problem: Problem) -> tuple[int, ...]:
    """Count the visible pairs of each rank over the whole ring: its share of the work."""
    plans = (schedule(problem, rank) for rank in range(problem.world))
    return tuple(sum(tile.pairs for step in plan for tile in step.tiles) for plan in plans)
