"""The work of one rank in one turn: attend to the keys that are here, call by call, and merge into the rank's rows.

`DenseWork` is full or causal attention, tile by tile. `DilatedWork` gathers what a dilated pattern keeps between two
ranks as dense calls: tokens that a branch keeps of a run and a segment lie at one stride, and so do those of the other
rank, so that along the two the number of visible keys grows by one per row, as in a dense ring. Calls of one shape in
different segments are stacked; their plan is pure index arrays in the ranks' own numbering. `LimitedWork` splits the
batch into runs of rows of one key length. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, product
from math import lcm
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from attnbench.impls.partial.torch_choice import choose, current
from attnbench.impls.partial.torch_passes import merge_
from attnbench.kernels.ring import schedule
from attnbench.kernels.ring.schedule import RingProblem, Tile, TokenRun, causal_tiles
from attnbench.masks import Blocks, Causal, Dilated, Full
from attnbench.spec import Partial, Workload

Pair = tuple[Tensor, Tensor]
"""Keys and values, or the sums of their gradients."""
Sums = list[tuple[Tensor, Tensor]]
"""Merged (out, lse) so far: one pair, or one for each branch that is mixed at the end."""
Whole = tuple[tuple[Tensor, ...], Tensor, Tensor]
"""Output of each channel, LSE, dout."""
Grads = tuple[Tensor, Tensor, Tensor]
"""Sums of dq, dk, dv so far."""


class TileKernels:
    """Kernels for the tiles of one problem on one device, made once for each shape.

    `shape` gives all that a tile does not; `inner` is an implementation's name or "auto".
    """

    def __init__(self, shape: Workload, inner: str, device: torch.device) -> None:
        self._shape, self._inner, self.device = shape, inner, device
        self._made: dict[Any, Partial] = {}
        self.batch = shape.batch
        """Batch rows of the whole problem."""
        self.used: dict[str, None] = {}
        """Names of the implementations that were chosen, in order."""

    def at(self, tile: Tile) -> Partial:
        """Return (forward, backward) for a tile of all heads; raise Unsupported with every refusal."""
        return self.of((self.batch, *tile.shape, self._shape.heads, self._shape.kv_heads), tile.causal)

    def of(self, sizes: tuple[int, int, int, int, int], causal: bool) -> Partial:
        """Return (forward, backward) for (batch, queries, keys, heads, kv_heads); raise Unsupported if none can."""
        rules = current()
        key = (*sizes, causal, rules)
        if key not in self._made:
            given = dict(zip(("batch", "q_len", "kv_len", "heads", "kv_heads"), sizes))
            given |= {"mask": Causal() if causal else Full(), "scale": self._shape.softmax_scale}
            workload = msgspec.structs.replace(self._shape, **given, source="", tags=())
            name, self._made[key] = choose(self._inner, workload, self.device.type, rules)
            self.used[name] = None
        return self._made[key]


def attend_tiles(kernels: TileKernels, tiles: Sequence[Tile], q: Tensor, pair: Pair, out: Tensor, lse: Tensor) -> None:
    """Merge the attention of all tiles into `out` and `lse`."""
    for tile in tiles:
        rows, keys = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
        part = kernels.at(tile)[0](q[:, rows], pair[0][:, keys], pair[1][:, keys])
        merge_(out[:, rows], lse[:, :, rows], *part)


def differentiate_tiles(
    kernels: TileKernels, tiles: Sequence[Tile], q: Tensor, pair: Pair, whole: tuple[Tensor, ...], grads: Grads
) -> None:
    """Add the gradients of all tiles to `grads`; `whole` is (out, lse, dout) of the rows of q."""
    out, lse, dout = whole
    for tile in tiles:
        rows, keys = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
        inputs = q[:, rows], pair[0][:, keys], pair[1][:, keys]
        parts = kernels.at(tile)[1](*inputs, out[:, rows], lse[:, :, rows], dout[:, rows])
        for total, part in zip((grads[0][:, rows], grads[1][:, keys], grads[2][:, keys]), parts):
            total.add_(part)


class DenseWork:
    """Full or causal attention; keys from position `limit` on are hidden."""

    channels = 1
    """Number of results that are mixed only at the end and whose own outputs the backward pass needs."""

    def __init__(self, problem: RingProblem, rank: int, kernels: TileKernels, limit: int | None = None) -> None:
        self.kernels = kernels
        self._steps = schedule.schedule(problem, rank, limit)

    def prepare(self) -> None:
        """Choose every kernel now: a refusal must come before the first message to another rank."""
        for step in self._steps:
            for tile in step.tiles:
                self.kernels.at(tile)

    def attend(self, turn: int, q: Tensor, pair: Pair, sums: Sums) -> None:
        """Merge the attention to this turn's keys into `sums`."""
        attend_tiles(self.kernels, self._steps[turn].tiles, q, pair, *sums[0])

    def differentiate(self, turn: int, q: Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        """Add this turn's gradients to `grads`."""
        (out,), lse, dout = whole
        differentiate_tiles(self.kernels, self._steps[turn].tiles, q, pair, (out, lse, dout), grads)


class DilatedCall(NamedTuple):
    """`stack` dense calls of one shape in which every row occurs once."""

    branch: int
    heads: tuple[int, ...]
    rows: np.ndarray
    """Places [stack, queries] in a rank's own order."""
    keys: np.ndarray
    """Places [stack, keys] in the order of the rank that holds them."""
    causal: bool

    @property
    def pairs(self) -> int:
        """Number of visible pairs, summed over the heads."""
        (stack, m), n = self.rows.shape, self.keys.shape[1]
        return len(self.heads) * stack * (m * (m + 1) // 2 if self.causal else m * n)


class _KeptTokens(NamedTuple):
    """Places of a run's tokens that an offset keeps in one segment and block, and the position of the first."""

    places: np.ndarray
    first: int


class _BranchHeads(NamedTuple):
    """Tokens offset, offset + rate, ... of segments of `width`, for some heads of one branch.

    `kept` [q blocks, k blocks] is the part of a block mask for these heads, or None.
    """

    number: int
    width: int
    rate: int
    offset: int
    heads: tuple[int, ...]
    kept: np.ndarray | None
    block_size: int


def calls(
    pattern: Dilated, heads: int, queries: Sequence[TokenRun], keys: Sequence[TokenRun], causal: bool,
    blocks: Blocks | None = None,
) -> tuple[DilatedCall, ...]:  # fmt: skip
    """Return the calls of a rank's queries against a rank's keys: each pair once for every branch that holds it.

    With `blocks`, only pairs whose block is kept; its block mask may differ by head, not by batch row.
    """
    return tuple(call for branch in _branches(pattern, heads, blocks) for call in _calls(branch, queries, keys, causal))


def _branches(pattern: Dilated, heads: int, blocks: Blocks | None) -> Iterator[_BranchHeads]:
    """Yield, for each branch, the groups of heads that keep the same tokens and blocks."""
    planes: list[np.ndarray | None] = [None] * heads
    if blocks is not None:
        array = blocks.block_mask.array
        array = array.reshape(-1, *array.shape[-2:])
        planes = [array[head if len(array) > 1 else 0] for head in range(heads)]
    size = 1 if blocks is None else blocks.block_size
    for number, (width, rate) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates)):
        alike: dict[tuple[int, bytes], list[int]] = {}
        for head, plane in enumerate(planes):
            key = int(pattern.head_offset(head, rate, heads)), b"" if plane is None else plane.tobytes()
            alike.setdefault(key, []).append(head)
        for (offset, _), members in alike.items():
            yield _BranchHeads(number, width, rate, offset, tuple(members), planes[members[0]], size)


def _calls(
    branch: _BranchHeads, queries: Sequence[TokenRun], keys: Sequence[TokenRun], causal: bool
) -> Iterator[DilatedCall]:
    of_queries, of_keys = list(_kept(queries, branch)), list(_kept(keys, branch))
    for (run, own), other in product(zip(queries, of_queries), of_keys):
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
            yield DilatedCall(branch.number, branch.heads, rows, columns, bool(square))


def _seen(
    place: tuple[int, int], other: dict[tuple[int, int], _KeptTokens], branch: _BranchHeads
) -> Iterator[_KeptTokens]:
    """Yield the keys of the same segment in kept blocks; neighbouring blocks are one stretch."""
    segment, row = place
    if branch.kept is None:
        if place in other:
            yield other[place]
        return
    plane = branch.kept
    columns = sorted(column for number, column in other if number == segment)
    for is_kept, stretch in groupby(columns, key=lambda column: bool(plane[row, column])):
        if is_kept:
            parts = [other[segment, column] for column in stretch]
            yield _KeptTokens(np.concatenate([part.places for part in parts]), parts[0].first)


def _kept(runs: Sequence[TokenRun], branch: _BranchHeads) -> Iterator[dict[tuple[int, int], _KeptTokens]]:
    """Yield for each run a dict (segment, block) -> tokens that the branch keeps; without a block mask, block is 0."""
    base = 0
    for run in runs:
        places = np.nonzero((run.positions % branch.width) % branch.rate == branch.offset)[0]
        positions = run.positions[places]
        block = positions // branch.block_size if branch.kept is not None else np.zeros_like(positions)
        groups, starts = np.unique(np.stack([positions // branch.width, block]), axis=1, return_index=True)
        parts = np.split(places + base, starts[1:])
        yield {
            (int(segment), int(block)): _KeptTokens(part, int(positions[start]))
            for segment, block, part, start in zip(*groups, parts, starts)
        }
        base += run.size


class Pattern(NamedTuple):
    """A dilated pattern over grouped heads, with or without a block mask.

    If `detached`, mixing weights count as constants in the backward pass.
    """

    mask: Dilated
    heads: int
    kv_heads: int
    detached: bool = False
    blocks: Blocks | None = None


class DilatedWork:
    """Attention of a dilated pattern: branches merge into one softmax, or, if detached, into one for each branch."""

    def __init__(
        self, problem: RingProblem, rank: int, kernels: TileKernels, pattern: Pattern, limit: int | None = None
    ) -> None:
        self.kernels = kernels
        self.channels = len(pattern.mask.segment_lengths) if pattern.detached else 1
        turns = plan(problem, rank, pattern, limit)
        self._gathers = [[_Gather(call, pattern, kernels.device) for call in turn] for turn in turns]

    def prepare(self) -> None:
        for gathers in self._gathers:
            for gather in gathers:
                gather.kernel(self.kernels, self.kernels.batch)

    def attend(self, turn: int, q: Tensor, pair: Pair, sums: Sums) -> None:
        for gather in self._gathers[turn]:
            out, lse = sums[gather.call.branch if self.channels > 1 else 0]
            views = gather.queries(q), gather.keys(pair[0]), gather.keys(pair[1])
            part = gather.kernel(self.kernels, q.shape[0])[0](*views)
            total, total_lse = gather.queries(out), gather.rows(lse)
            merge_(total, total_lse, *part)
            gather.put_queries(out, total)
            gather.put_rows(lse, total_lse)

    def differentiate(self, turn: int, q: Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        outs, lse, dout = whole
        for gather in self._gathers[turn]:
            out = outs[gather.call.branch if self.channels > 1 else 0]
            views = gather.queries(q), gather.keys(pair[0]), gather.keys(pair[1])
            of_whole = gather.queries(out), gather.rows(lse), gather.queries(dout)
            dq, dk, dv = gather.kernel(self.kernels, q.shape[0])[1](*views, *of_whole)
            gather.put_queries(grads[0], gather.queries(grads[0]) + dq)
            gather.add_keys(grads[1], dk)
            gather.add_keys(grads[2], dv)


@lru_cache(maxsize=64)
def plan(
    problem: RingProblem, rank: int, pattern: Pattern, limit: int | None = None
) -> tuple[tuple[DilatedCall, ...], ...]:
    """Return the calls of each turn; keys from position `limit` on are hidden."""
    problem.check()
    by_rank = [schedule.runs(problem.layout, problem.q_len, problem.world, other) for other in range(problem.world)]
    seen = by_rank if limit is None else [schedule.before(runs, limit) for runs in by_rank]
    sources = [(rank - turn) % problem.world for turn in range(problem.world)]
    given = (problem.causal, pattern.blocks)
    return tuple(calls(pattern.mask, pattern.heads, by_rank[rank], seen[source], *given) for source in sources)


class _Gather:
    """The tokens and heads of one call, read from arrays [b, t, h, d] and [b, h, t] as a batch of dense problems."""

    def __init__(self, call: DilatedCall, pattern: Pattern, device: torch.device) -> None:
        def index(values: object) -> Tensor:
            return torch.as_tensor(values, dtype=torch.long, device=device)

        self.call = call
        self._stack, self._queries = call.rows.shape
        group = pattern.heads // pattern.kv_heads
        # All heads together keep their grouping; a subset of heads takes a copy of the key/value head for each.
        all_heads = len(call.heads) == pattern.heads
        kv_heads = range(pattern.kv_heads) if all_heads else [head // group for head in call.heads]
        self._rows, self._columns = index(call.rows.ravel()), index(call.keys.ravel())
        self._heads, self._kv_heads = index(call.heads), index(list(kv_heads))

    def kernel(self, kernels: TileKernels, batch: int) -> Partial:
        """Return (forward, backward) for the stacked problems."""
        sizes = (batch * self._stack, self._queries, self.call.keys.shape[1], len(self._heads), len(self._kv_heads))
        return kernels.of(sizes, self.call.causal)

    def queries(self, x: Tensor) -> Tensor:
        """Gather [b * stack, queries, heads, d] from [b, t, h, d]."""
        return x[:, self._rows[:, None], self._heads].unflatten(1, (self._stack, -1)).flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """Gather [b * stack, keys, kv_heads, d] from [b, t, g, d]."""
        return x[:, self._columns[:, None], self._kv_heads].unflatten(1, (self._stack, -1)).flatten(0, 1)

    def rows(self, x: Tensor) -> Tensor:
        """Gather [b * stack, heads, queries] from [b, h, t]."""
        picked = x[:, self._heads[:, None], self._rows].unflatten(2, (self._stack, -1))
        return picked.transpose(1, 2).flatten(0, 1)

    def put_queries(self, x: Tensor, values: Tensor) -> None:
        """Write back what `queries` gathered; a row occurs once, so nothing is lost."""
        x[:, self._rows[:, None], self._heads] = values.unflatten(0, (-1, self._stack)).flatten(1, 2).to(x.dtype)

    def put_rows(self, x: Tensor, values: Tensor) -> None:
        x[:, self._heads[:, None], self._rows] = values.unflatten(0, (-1, self._stack)).transpose(1, 2).flatten(2, 3)

    def add_keys(self, x: Tensor, values: Tensor) -> None:
        """Add to the places of [b, t, g, d] that `keys` gathered; key/value heads may occur more than once."""
        places = self._columns[:, None] * x.shape[2] + self._kv_heads
        flat = values.unflatten(0, (-1, self._stack)).flatten(1, 2).flatten(1, 2).to(x.dtype)
        torch.Tensor.index_add_(x.flatten(1, 2), 1, places.flatten(), flat)


class LimitedWork:
    """Works of consecutive batch rows with different key lengths. All keys travel; hidden keys are never read."""

    def __init__(self, parts: Sequence[tuple[slice, DenseWork | DilatedWork]]) -> None:
        self._parts = parts
        self.kernels, self.channels = parts[0][1].kernels, parts[0][1].channels

    def attend(self, turn: int, q: Tensor, pair: Pair, sums: Sums) -> None:
        for rows, work in self._parts:
            own = [(out[rows], lse[rows]) for out, lse in sums]
            work.attend(turn, q[rows], (pair[0][rows], pair[1][rows]), own)

    def differentiate(self, turn: int, q: Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        outs, lse, dout = whole
        for rows, work in self._parts:
            own = tuple(out[rows] for out in outs), lse[rows], dout[rows]
            dq, dk, dv = (grad[rows] for grad in grads)
            work.differentiate(turn, q[rows], (pair[0][rows], pair[1][rows]), own, (dq, dk, dv))


RankWork = DenseWork | DilatedWork | LimitedWork


def work_of(
    problem: RingProblem, rank: int, kernels: TileKernels, pattern: Pattern | None, limit: int | None = None
) -> DenseWork | DilatedWork:
    """Return one rank's part of a problem; keys from position `limit` on are hidden."""
    if pattern is None:
        return DenseWork(problem, rank, kernels, limit)
    return DilatedWork(problem, rank, kernels, pattern, limit)


def pattern_of(workload: Workload) -> Pattern | None:
    """Return the dilated pattern of a workload's mask, or None if it has none."""
    mask = next((part for part in workload.visible_mask.split() if isinstance(part, Dilated)), None)
    return None if mask is None else Pattern(mask, workload.heads, workload.kv_heads)


def pairs_of(workload: Workload, problem: RingProblem) -> tuple[int, ...]:
    """Count the pairs that each rank computes for one batch row and, on average, one head."""
    pattern = pattern_of(workload)
    if pattern is None:
        return schedule.pairs(problem)
    plans = [plan(problem, rank, pattern) for rank in range(problem.world)]
    return tuple(sum(call.pairs for turn in turns for call in turn) // workload.heads for turns in plans)
