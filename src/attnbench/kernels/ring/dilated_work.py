"""The work of one rank for a dilated pattern: the pattern between two ranks as dense calls, gathered and merged back.

Tokens that a branch keeps of a run and a segment lie at one stride, and so do those of the other rank: along the two
the number of visible keys grows by one per row, as in a dense ring. Calls of one shape in different segments are
stacked. The plan is pure: index arrays in the ranks' own numbering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnbench.impls.partial.torch_passes import merge_
from attnbench.kernels.ring import schedule
from attnbench.kernels.ring.schedule import Problem, Run, causal_tiles
from attnbench.kernels.ring.work import DenseWork, Grads, Kernels, Pair, Sums, Whole
from attnbench.masks import Blocks, Dilated
from attnbench.spec import Partial, Workload

if TYPE_CHECKING:
    import torch


class Call(NamedTuple):
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


class _Kept(NamedTuple):
    """Places of a run's tokens that an offset keeps in one segment and block, and the position of the first."""

    places: np.ndarray
    first: int


class _Branch(NamedTuple):
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
    pattern: Dilated,
    heads: int,
    queries: Sequence[Run],
    keys: Sequence[Run],
    causal: bool,
    blocks: Blocks | None = None,
) -> tuple[Call, ...]:
    """Return the calls of a rank's queries against a rank's keys: each pair once for every branch that holds it.

    With `blocks`, only pairs whose block is kept; its block mask may differ by head, not by batch row.
    """
    return tuple(call for branch in _branches(pattern, heads, blocks) for call in _calls(branch, queries, keys, causal))


def _branches(pattern: Dilated, heads: int, blocks: Blocks | None) -> Iterator[_Branch]:
    """Yield, for each branch, the groups of heads that keep the same tokens and blocks."""
    planes: list[np.ndarray | None] = [None] * heads
    if blocks is not None:
        array = blocks.block_mask.array
        array = array.reshape(-1, *array.shape[-2:])
        planes = [array[head if len(array) > 1 else 0] for head in range(heads)]
    size = 1 if blocks is None else blocks.block_size
    for number, (width, rate) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates)):
        alike: dict[tuple[int, bytes], list[int]] = {}
        for head in range(heads):
            plane = planes[head]
            key = int(pattern.head_offset(head, rate, heads)), b"" if plane is None else plane.tobytes()
            alike.setdefault(key, []).append(head)
        for (offset, _), members in alike.items():
            yield _Branch(number, width, rate, offset, tuple(members), planes[members[0]], size)


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
    """Yield the keys of the same segment in kept blocks; neighbouring blocks are one stretch."""
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
    """Yield for each run a dict (segment, block) -> tokens that the branch keeps; without a block mask, block is 0."""
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
        self, problem: Problem, rank: int, kernels: Kernels, pattern: Pattern, limit: int | None = None
    ) -> None:
        self.kernels, self._pattern = kernels, pattern
        self.channels = len(pattern.mask.segment_lengths) if pattern.detached else 1
        self._plan = plan(problem, rank, pattern, limit)
        self._indices: dict[torch.device, list[list[_Gather]]] = {}

    def prepare(self, device: torch.device) -> None:
        batch = self.kernels.batch
        for gathers in self._on(device):
            for gather in gathers:
                gather.kernel(self.kernels, batch)

    def attend(self, turn: int, q: torch.Tensor, pair: Pair, sums: Sums) -> None:
        for gather in self._on(q.device)[turn]:
            out, lse = sums[gather.call.branch if self.channels > 1 else 0]
            views = gather.queries(q), gather.keys(pair[0]), gather.keys(pair[1])
            part = gather.kernel(self.kernels, q.shape[0])[0](*views)
            total, total_lse = gather.queries(out), gather.rows(lse)
            merge_(total, total_lse, *part)
            gather.put_queries(out, total)
            gather.put_rows(lse, total_lse)

    def differentiate(self, turn: int, q: torch.Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        outs, lse, dout = whole
        for gather in self._on(q.device)[turn]:
            out = outs[gather.call.branch if self.channels > 1 else 0]
            views = gather.queries(q), gather.keys(pair[0]), gather.keys(pair[1])
            of_whole = gather.queries(out), gather.rows(lse), gather.queries(dout)
            found = gather.kernel(self.kernels, q.shape[0])[1](*views, *of_whole)
            gather.put_queries(grads[0], gather.queries(grads[0]) + found[0])
            gather.add_keys(grads[1], found[1])
            gather.add_keys(grads[2], found[2])

    def _on(self, device: torch.device) -> list[list[_Gather]]:
        if device not in self._indices:
            pattern = self._pattern
            self._indices[device] = [[_Gather(one, pattern, device) for one in turn] for turn in self._plan]
        return self._indices[device]


@lru_cache(maxsize=64)
def plan(problem: Problem, rank: int, pattern: Pattern, limit: int | None = None) -> tuple[tuple[Call, ...], ...]:
    """Return the calls of each turn; keys from position `limit` on are hidden."""
    problem.check()
    held = [schedule.runs(problem.layout, problem.q_len, problem.world, one) for one in range(problem.world)]
    sources = [(rank - turn) % problem.world for turn in range(problem.world)]
    seen = held if limit is None else [schedule.before(runs, limit) for runs in held]
    given = (problem.causal, pattern.blocks)
    return tuple(calls(pattern.mask, pattern.heads, held[rank], seen[one], *given) for one in sources)


class _Gather:
    """The tokens and heads of one call, read from arrays [b, t, h, d] and [b, h, t] as a batch of dense problems."""

    def __init__(self, call: Call, pattern: Pattern, device: torch.device) -> None:
        import torch

        def index(values: object) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.long, device=device)

        self.call = call
        self._stack, self._queries = call.rows.shape
        group = pattern.heads // pattern.kv_heads
        all_heads = len(call.heads) == pattern.heads
        # All heads together keep their grouping; a subset of heads takes a copy of the key/value head for each.

        kv_heads = range(pattern.kv_heads) if all_heads else [head // group for head in call.heads]
        self._rows, self._columns = index(call.rows.ravel()), index(call.keys.ravel())
        self._heads, self._kv_heads = index(call.heads), index(list(kv_heads))

    def kernel(self, kernels: Kernels, batch: int) -> Partial:
        """Return (forward, backward) for the stacked problems."""
        sizes = (batch * self._stack, self._queries, self.call.keys.shape[1], len(self._heads), len(self._kv_heads))
        return kernels.of(sizes, self.call.causal)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [b * stack, queries, heads, d] from [b, t, h, d]."""
        return x[:, self._rows[:, None], self._heads].unflatten(1, (self._stack, -1)).flatten(0, 1)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [b * stack, keys, kv_heads, d] from [b, t, g, d]."""
        return x[:, self._columns[:, None], self._kv_heads].unflatten(1, (self._stack, -1)).flatten(0, 1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [b * stack, heads, queries] from [b, h, t]."""
        picked = x[:, self._heads[:, None], self._rows].unflatten(2, (self._stack, -1))
        return picked.transpose(1, 2).flatten(0, 1)

    def put_queries(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what `queries` gathered; a row occurs once, so nothing is lost."""
        x[:, self._rows[:, None], self._heads] = values.unflatten(0, (-1, self._stack)).flatten(1, 2).to(x.dtype)

    def put_rows(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what `rows` gathered."""
        x[:, self._heads[:, None], self._rows] = values.unflatten(0, (-1, self._stack)).transpose(1, 2).flatten(2, 3)

    def add_keys(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Add to the places of [b, t, g, d] that `keys` gathered; key/value heads may occur more than once."""
        import torch

        places = self._columns[:, None] * x.shape[2] + self._kv_heads
        flat = values.unflatten(0, (-1, self._stack)).flatten(1, 2).flatten(1, 2).to(x.dtype)
        torch.Tensor.index_add_(x.flatten(1, 2), 1, places.flatten(), flat)


def work_of(
    problem: Problem, rank: int, kernels: Kernels, pattern: Pattern | None, limit: int | None = None
) -> DenseWork | DilatedWork:
    """Return one rank's part of a problem; keys from position `limit` on are hidden."""
    if pattern is None:
        return DenseWork(problem, rank, kernels, limit)
    return DilatedWork(problem, rank, kernels, pattern, limit)


def pattern_of(workload: Workload) -> Pattern | None:
    """Return the dilated pattern of a workload's mask, or None if it has none."""
    mask = next((part for part in workload.visible_mask.split() if isinstance(part, Dilated)), None)
    return None if mask is None else Pattern(mask, workload.heads, workload.kv_heads)


def pairs_of(workload: Workload, problem: Problem) -> tuple[int, ...]:
    """Count the pairs that each rank computes for one batch row and, on average, one head."""
    pattern = pattern_of(workload)
    if pattern is None:
        return schedule.pairs(problem)
    plans = [plan(problem, rank, pattern) for rank in range(problem.world)]
    return tuple(sum(call.pairs for turn in one for call in turn) // workload.heads for one in plans)
