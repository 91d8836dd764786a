"""What a rank computes of a dilated pattern with the keys that are here: tokens gathered, attended to, merged back."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from attnbench.impls.partial.torch_passes import merge_
from attnbench.kernels.ring import layouts
from attnbench.kernels.ring.dilated_plan import Call, calls
from attnbench.kernels.ring.kernels import Kernels
from attnbench.kernels.ring.schedule import Problem
from attnbench.kernels.ring.transport import Pair
from attnbench.kernels.ring.work import Grads, Sums, Whole
from attnbench.masks import Blocks, Dilated
from attnbench.spec import Partial

if TYPE_CHECKING:
    import torch


class Pattern(NamedTuple):
    """A dilated pattern over grouped heads, met with a block mask or not.

    `detached`: mixing weights count as constants in the backward pass.
    """

    mask: Dilated
    heads: int
    kv_heads: int
    detached: bool = False
    blocks: Blocks | None = None


class DilatedWork:
    """Every head runs every branch; all of them merge into one softmax, or, detached, into one for each branch."""

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
    """The calls of each turn; keys from position `limit` on are hidden."""
    problem.check()
    held = [layouts.runs(problem.layout, problem.q_len, problem.world, one) for one in range(problem.world)]
    sources = [(rank - turn) % problem.world for turn in range(problem.world)]
    seen = held if limit is None else [layouts.before(runs, limit) for runs in held]
    given = (problem.causal, pattern.blocks)
    return tuple(calls(pattern.mask, pattern.heads, held[rank], seen[one], *given) for one in sources)


class _Gather:
    """One call's tokens and heads of [b, t, h, d] and [b, h, t] arrays, stacked as a batch of dense problems."""

    def __init__(self, call: Call, pattern: Pattern, device: torch.device) -> None:
        import torch

        def index(values: object) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.long, device=device)

        self.call = call
        self._stack, self._queries = call.rows.shape
        group = pattern.heads // pattern.kv_heads
        all_heads = len(call.heads) == pattern.heads
        # All heads keep their grouping; of some, each brings its own copy of its key/value head.
        kv_heads = range(pattern.kv_heads) if all_heads else [head // group for head in call.heads]
        self._rows, self._columns = index(call.rows.ravel()), index(call.keys.ravel())
        self._heads, self._kv_heads = index(call.heads), index(list(kv_heads))

    def kernel(self, kernels: Kernels, batch: int) -> Partial:
        """(forward, backward) for the stacked problems."""
        sizes = (batch * self._stack, self._queries, self.call.keys.shape[1], len(self._heads), len(self._kv_heads))
        return kernels.of(sizes, self.call.causal)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[b * stack, queries, heads, d] of [b, t, h, d]."""
        return x[:, self._rows[:, None], self._heads].unflatten(1, (self._stack, -1)).flatten(0, 1)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """The same of keys."""
        return x[:, self._columns[:, None], self._kv_heads].unflatten(1, (self._stack, -1)).flatten(0, 1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[b * stack, heads, queries] of [b, h, t]."""
        picked = x[:, self._heads[:, None], self._rows].unflatten(2, (self._stack, -1))
        return picked.transpose(1, 2).flatten(0, 1)

    def put_queries(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what `queries` read; a row occurs once, so nothing is lost."""
        x[:, self._rows[:, None], self._heads] = values.unflatten(0, (-1, self._stack)).flatten(1, 2).to(x.dtype)

    def put_rows(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what `rows` read."""
        x[:, self._heads[:, None], self._rows] = values.unflatten(0, (-1, self._stack)).transpose(1, 2).flatten(2, 3)

    def add_keys(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Add to [b, t, h, d] where `keys` read; key/value heads may occur more than once."""
        import torch

        places = self._columns[:, None] * x.shape[2] + self._kv_heads
        flat = values.unflatten(0, (-1, self._stack)).flatten(1, 2).flatten(1, 2).to(x.dtype)
        torch.Tensor.index_add_(x.flatten(1, 2), 1, places.flatten(), flat)
