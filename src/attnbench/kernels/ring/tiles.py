"""What of a block of (query, key) pairs has to be computed: rectangles that are full, and squares that are causal.

Every kernel with a partial form can do those two, so that no kernel needs to know where its tokens came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attnbench.kernels.ring.layouts import Run


class Tile(NamedTuple):
    """Rows [row, row_end) of the queries against keys [key, key_end), in a rank's own numbering."""

    row: int
    row_end: int
    key: int
    key_end: int
    causal: bool = False
    """Square, and row n sees keys up to n (counted within the tile)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.row_end - self.row, self.key_end - self.key

    @property
    def pairs(self) -> int:
        """Pairs that see each other."""
        rows, keys = self.shape
        return rows * (rows + 1) // 2 if self.causal else rows * keys


def causal_tiles(rows: int, keys: int, offset: int) -> list[Tile]:
    """Tiles that cover exactly the pairs with key <= row + offset."""
    first = max(0, -offset)
    """The first row that sees a key."""
    left = min(max(0, offset), keys)
    """Keys that every row sees, but for the last of them, which begins the diagonal."""
    last = min(max(first, keys - offset), rows)
    """From this row on every key is seen."""
    found = [
        Tile(first, last, 0, left),
        Tile(first, last, left, last + offset, causal=True),
        Tile(max(first, last), rows, 0, keys),
    ]
    return [tile for tile in found if min(tile.shape) > 0]


def block_tiles(queries: Sequence[Run], keys: Sequence[Run], causal: bool, shift: int = 0) -> tuple[Tile, ...]:
    """Tiles of a rank's queries against a rank's keys; query i sees key j when j <= i + shift, or always.

    Runs of both sides have one stride, so that along a pair of runs the number of visible keys grows by one per row.
    """
    found: list[Tile] = []
    row = 0
    for q in queries:
        key = 0
        for k in keys:
            offset = (q.first + shift - k.first) // q.stride if causal else k.size
            found += [_moved(tile, row, key) for tile in causal_tiles(q.size, k.size, offset)]
            key += k.size
        row += q.size
    return tuple(_joined(found))


def _moved(tile: Tile, rows: int, keys: int) -> Tile:
    return Tile(tile.row + rows, tile.row_end + rows, tile.key + keys, tile.key_end + keys, tile.causal)


def _joined(tiles: Iterable[Tile]) -> list[Tile]:
    """Full tiles that lie side by side become one: one kernel call instead of two."""
    done: list[Tile] = []
    for tile in tiles:
        while (neighbour := next((other for other in done if _union(other, tile)), None)) is not None:
            done.remove(neighbour)
            tile = _union(neighbour, tile) or tile
        done.append(tile)
    return done


def _union(a: Tile, b: Tile) -> Tile | None:
    """The rectangle that both make, if they make one."""
    if a.causal or b.causal:
        return None
    same_rows, same_keys = (a.row, a.row_end) == (b.row, b.row_end), (a.key, a.key_end) == (b.key, b.key_end)
    if not (same_rows and a.key_end == b.key) and not (same_keys and a.row_end == b.row):
        return None
    return Tile(a.row, b.row_end, a.key, b.key_end)
