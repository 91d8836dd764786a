"""The plan of a ring before anything is computed: settings, accepted masks, and the pairs of each rank and step.

Pure arithmetic. A rank's tokens are a few runs of equal stride, so that the visible pairs of two ranks are rectangles
that are full and squares that are causal. Every kernel with a partial form can compute those two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.impls._arguments import check_whole
from attnbench.impls.conditions import needs_mask
from attnbench.masks import Causal
from attnbench.masks.base import query_offset
from attnbench.spec import DTYPE_BYTES, Config, Workload

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
TUNABLES: Config = {"world": 2, "layout": "zigzag", "inner": "auto", "timeout_s": 120.0}
DENSE = ("full", "causal")
BY_NAME_ONLY = "spans several processes or devices, so it is not ranked among kernels of one device"


class TokenRun(NamedTuple):
    """`size` tokens at positions first, first + stride, ..."""

    first: int
    size: int
    stride: int = 1

    @property
    def positions(self) -> np.ndarray:
        """Global positions in order."""
        return self.first + self.stride * np.arange(self.size)


def check_layout(layout: str) -> None:
    """Raise UsageError for an unknown layout."""
    if layout not in LAYOUTS:
        raise UsageError(f'layout "{layout}" is not one of {", ".join(LAYOUTS)}.')


def runs(layout: str, length: int, world: int, rank: int) -> tuple[TokenRun, ...]:
    """Return the runs of one rank in the order in which it stores them, without empty ones.

    contiguous: one chunk; zigzag: chunks r and 2n-1-r of 2n, so that each rank has an early and a late chunk; striped:
    every n-th token. If the length does not divide, chunks differ by at most one token.
    """
    check_layout(layout)
    if not 0 <= rank < world:
        raise UsageError(f"rank must be from 0 to {world - 1}, not {rank}.")
    if layout == "striped":
        of_rank = [TokenRun(rank, len(range(rank, length, world)), world)]
    else:
        parts, chunks = (world, (rank,)) if layout == "contiguous" else (2 * world, (rank, 2 * world - 1 - rank))
        size, longer = divmod(length, parts)
        of_rank = [TokenRun(n * size + min(n, longer), size + (n < longer)) for n in chunks]
    return tuple(run for run in of_rank if run.size)


def before(ordered: Sequence[TokenRun], limit: int) -> tuple[TokenRun, ...]:
    """Return the tokens of ordered runs that lie before position `limit`; a rank stores the dropped ones last."""
    cut = (run._replace(size=min(run.size, len(range(run.first, limit, run.stride)))) for run in ordered)
    return tuple(run for run in cut if run.size)


def positions(layout: str, length: int, world: int, rank: int) -> np.ndarray:
    """Return the global positions of a rank's tokens, in the order it stores them."""
    parts = [run.positions for run in runs(layout, length, world, rank)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def sizes(layout: str, length: int, world: int) -> tuple[int, ...]:
    """Count the tokens of each rank."""
    return tuple(sum(run.size for run in runs(layout, length, world, rank)) for rank in range(world))


class RingProblem(NamedTuple):
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
            raise UsageError(f"a ring needs at least 1 rank, not {self.world}.")
        if min(self.q_len, self.kv_len) < 1:
            raise UsageError("a ring needs at least one query and one key.")

    def q_sizes(self) -> tuple[int, ...]:
        return sizes(self.layout, self.q_len, self.world)

    def kv_sizes(self) -> tuple[int, ...]:
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
        rows, keys = self.shape
        return rows * (rows + 1) // 2 if self.causal else rows * keys


def causal_tiles(rows: int, keys: int, offset: int) -> list[Tile]:
    """Return tiles that cover exactly the pairs with key <= row + offset."""
    first = max(0, -offset)  # the first row that sees a key
    left = min(max(0, offset), keys)  # keys that every row sees, without the last of them, which begins the diagonal
    last = min(max(first, keys - offset), rows)  # the first row that sees every key
    tiles = (
        Tile(first, last, 0, left),
        Tile(first, last, left, last + offset, causal=True),
        Tile(max(first, last), rows, 0, keys),
    )
    return [tile for tile in tiles if min(tile.shape) > 0]


def block_tiles(
    queries: Sequence[TokenRun], keys: Sequence[TokenRun], causal: bool, shift: int = 0
) -> tuple[Tile, ...]:
    """Return tiles of a rank's queries against a rank's keys; query i sees key j if j <= i + shift or not `causal`.

    Runs of both sides have one stride, so that along a pair of runs the number of visible keys grows by one per row.
    """
    tiles: list[Tile] = []
    row = 0
    for q in queries:
        key = 0
        for k in keys:
            offset = (q.first + shift - k.first) // q.stride if causal else k.size
            for t in causal_tiles(q.size, k.size, offset):
                tile = Tile(t.row + row, t.row_end + row, t.key + key, t.key_end + key, t.causal)
                # Full tiles that lie side by side are one kernel call instead of two.
                while (neighbour := next((other for other in tiles if _union(other, tile)), None)) is not None:
                    tiles.remove(neighbour)
                    tile = _union(neighbour, tile) or tile
                tiles.append(tile)
            key += k.size
        row += q.size
    return tuple(tiles)


def _union(a: Tile, b: Tile) -> Tile | None:
    """Return the rectangle that two full tiles make together, or None if they make none."""
    if a.causal or b.causal:
        return None
    same_rows, same_keys = (a.row, a.row_end) == (b.row, b.row_end), (a.key, a.key_end) == (b.key, b.key_end)
    if not (same_rows and a.key_end == b.key) and not (same_keys and a.row_end == b.row):
        return None
    return Tile(a.row, b.row_end, a.key, b.key_end)


class RingStep(NamedTuple):
    """One turn of the ring for one rank."""

    source: int
    """Rank whose keys and values are here in this turn."""
    tiles: tuple[Tile, ...]
    """Visible pairs, none if the rank's queries see no key of the source."""


def schedule(problem: RingProblem, rank: int, limit: int | None = None) -> tuple[RingStep, ...]:
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
        steps.append(RingStep(source, block_tiles(queries, keys, problem.causal, problem.shift)))
    return tuple(steps)


def pairs(problem: RingProblem) -> tuple[int, ...]:
    """Count the visible pairs of each rank over the whole ring: its share of the work."""
    plans = (schedule(problem, rank) for rank in range(problem.world))
    return tuple(sum(tile.pairs for step in plan for tile in step.tiles) for plan in plans)


class RingSettings(NamedTuple):
    """A config with its defaults, checked."""

    world: int
    layout: str
    inner: str
    timeout_s: float

    @classmethod
    def of(cls, config: Config) -> RingSettings:
        """Read a config; raise UsageError for unknown settings and impossible values."""
        unknown = sorted(set(config) - set(TUNABLES))
        if unknown:
            raise UsageError(f"a ring has no setting {', '.join(unknown)}; its settings are {', '.join(TUNABLES)}.")
        given = {**TUNABLES, **config}
        world, timeout_s = given["world"], given["timeout_s"]
        check_whole("world", world, 1)
        if isinstance(timeout_s, str) or not timeout_s > 0:
            raise UsageError(f"timeout_s must be positive, not {timeout_s!r}.")
        layout = str(given["layout"])
        check_layout(layout)
        return cls(int(world), layout, str(given["inner"]), float(timeout_s))


def check_inner(inner: object) -> None:
    """Raise UsageError unless `inner` is "auto" or an implementation with that name exists."""
    if inner != TUNABLES["inner"]:
        registry.get(str(inner))


def problem_of(workload: Workload, world: int, layout: str) -> RingProblem:
    """Return a workload's problem over `world` ranks; a causal mask shows query i the keys up to i + shift."""
    causal = next((part for part in workload.visible_mask.split() if isinstance(part, Causal)), None)
    shift = 0 if causal is None else query_offset(causal.align, workload.mask_shape)
    return RingProblem(workload.q_len, workload.kv_len, world, layout, causal is not None, shift)


def needs_dense_mask(workload: Workload) -> str | None:
    """Refuse every mask but full and one causal mask."""
    several = len(workload.visible_mask.kinds) > 1
    return needs_mask(workload, *DENSE) or ("takes one mask, not several" if several else None)


def needs_ring_mask(workload: Workload) -> str | None:
    """Refuse every mask but full, causal, dilated, and dilated with causal, each once."""
    kinds = workload.visible_mask.kinds
    repeated = "takes each kind of mask once" if len(set(kinds)) < len(kinds) else None
    return needs_mask(workload, *DENSE, "dilated") or repeated


def shard_bytes(workload: Workload, problem: RingProblem) -> tuple[int, ...]:
    """Count the bytes of q, k and v that each rank holds."""
    itemsize = DTYPE_BYTES[workload.dtype]
    per_query = workload.batch * workload.heads * workload.head_dim * itemsize
    per_key = workload.batch * workload.kv_heads * (workload.head_dim + workload.value_dim) * itemsize
    return tuple(q * per_query + kv * per_key for q, kv in zip(problem.q_sizes(), problem.kv_sizes()))


def balance(work: Sequence[float]) -> float:
    """Return the mean over the largest of the ranks' work: 1 if all ranks have the same to do."""
    return sum(work) / len(work) / max(work) if max(work) else 1.0
