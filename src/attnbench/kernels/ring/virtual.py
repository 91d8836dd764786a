"""Ranks of one process, one after the other: all that one device can show of a ring.

What each rank computes and how much memory it takes is real; no link is used, so communication has no figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

from attnbench.frameworks.base import Inputs, Peak
from attnbench.kernels.ring import layouts
from attnbench.kernels.ring.engine import Engine
from attnbench.kernels.ring.kernels import Kernels
from attnbench.kernels.ring.methods import Ours, peak_of, program_of
from attnbench.kernels.ring.schedule import Problem
from attnbench.kernels.ring.settings import Settings, problem_of
from attnbench.kernels.ring.spans import Spans
from attnbench.kernels.ring.transport import Pair, VirtualTransport
from attnbench.kernels.ring.works import work_of
from attnbench.spec import Pass, Workload

if TYPE_CHECKING:
    import torch

LOOKS = 3
Shard = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


class VirtualRing:
    """`(q, k, v) -> out`, or (out, lse), with the ranks' work done in turn."""

    def __init__(self, workload: Workload, settings: Settings, with_lse: bool = False) -> None:
        self.workload, self.settings, self._with_lse = workload, settings, with_lse
        self.problem = problem_of(workload, settings.world, settings.layout)
        self.inner: tuple[str, ...] = ()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Differentiable; the LSE, float32, carries no gradient."""
        out, lse = _autograd_function().apply(q, k, v, self)
        return (out, lse.float()) if self._with_lse else out

    def engine(self, rank: int, device: torch.device) -> Engine:
        """A rank's plan and kernels."""
        return _engine(self.workload, self.problem, rank, self.settings.inner, device)

    def shards(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Shard]:
        """What each rank would hold, in memory of its own."""
        return [
            (self.take(q, "q", rank), self.take(k, "kv", rank), self.take(v, "kv", rank))
            for rank in range(self.settings.world)
        ]

    def take(self, array: torch.Tensor, side: str, rank: int) -> torch.Tensor:
        """A rank's tokens."""
        return array.detach().index_select(1, self.places(side, rank, array.device))

    def places(self, side: str, rank: int, device: torch.device) -> torch.Tensor:
        """Positions of a rank's tokens."""
        return _places(self.problem, side, rank, device)

    def weigh(self, inputs: Inputs, pass_: Pass, rank: int) -> tuple[Peak, float]:
        """Extra memory at the peak of one rank's part, and its compute time in ns, each rank by itself."""
        shards, device = self.shards(*inputs[:3]), inputs.q.device
        held: list[Pair] = [(k, v) for _, k, v in shards]
        (q, k, v), dout = shards[rank], self.take(inputs.dout, "q", rank)
        method, mine = Ours(self.engine(rank, device), VirtualTransport(held)), Inputs(q, k, v, dout)
        peak = peak_of(program_of(method, pass_), mine, device)
        times = []
        for _ in range(LOOKS):
            spans = Spans(device.type)
            program = program_of(method, pass_, spans)
            program.run(program.prepare(mine))
            times.append(spans.ns["compute"])
        return peak, float(median(times))


@lru_cache(maxsize=64)
def _engine(workload: Workload, problem: Problem, rank: int, inner: str, device: torch.device) -> Engine:
    return Engine(problem, rank, work_of(workload, problem, rank, Kernels(workload, inner, device)))


@lru_cache(maxsize=256)
def _places(problem: Problem, side: str, rank: int, device: torch.device) -> torch.Tensor:
    import torch

    length = problem.q_len if side == "q" else problem.kv_len
    return torch.from_numpy(layouts.positions(problem.layout, length, problem.world, rank)).to(device)


@lru_cache(maxsize=1)
def _autograd_function() -> Any:
    import torch

    from attnbench.impls.partial.torch_autograd import once

    class InTurn(torch.autograd.Function):
        """The ranks' parts of both passes, one rank after the other."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, ring: VirtualRing) -> Any:
            shards = ring.shards(q, k, v)
            held: Sequence[Pair] = [(shard[1], shard[2]) for shard in shards]
            out = q.new_empty(*q.shape[:3], v.shape[-1])
            lse = None
            parts = []
            for rank, shard in enumerate(shards):
                engine = ring.engine(rank, q.device)
                part, part_lse, *own = engine.forward(*shard, VirtualTransport(held))
                ring.inner = tuple(engine.work.kernels.used) or ring.inner
                places = ring.places("q", rank, q.device)
                lse = part_lse.new_empty(*part_lse.shape[:2], q.shape[1]) if lse is None else lse
                out.index_copy_(1, places, part)
                lse.index_copy_(2, places, part_lse)
                parts.append((part, part_lse, *own))
            if any(ctx.needs_input_grad):
                # The whole arrays too, so that a second derivative by them is refused.
                ctx.save_for_backward(q, k, v, *(x for shard, part in zip(shards, parts) for x in (*shard, *part)))
            ctx.ring = ring
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return *once(partial(_backward, ctx.ring), grads[0], *ctx.saved_tensors), None

    return InTurn


def _backward(ring: VirtualRing, dout: torch.Tensor, *saved: torch.Tensor) -> Shard:
    """Gradients of the whole arrays, which come first of what was saved; each rank's shards and results follow."""
    import torch

    size = (len(saved) - 3) // ring.settings.world
    kept = [saved[n : n + size] for n in range(3, len(saved), size)]
    held: Sequence[Pair] = [(one[1], one[2]) for one in kept]
    sums: list[Pair | None] = [None] * len(kept)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])
    for rank, (q, k, v, *results) in enumerate(kept):
        part = ring.engine(rank, q.device).backward(
            (q, k, v), results, ring.take(dout, "q", rank), VirtualTransport(held, sums)
        )
        dq.index_copy_(1, ring.places("q", rank, q.device), part[0])
        if len(kept) == 1:
            sums[0] = part[1], part[2]
    for rank, pair in enumerate(sums):
        assert pair is not None
        places = ring.places("kv", rank, dk.device)
        dk.index_copy_(1, places, pair[0].to(dk.dtype))
        dv.index_copy_(1, places, pair[1].to(dv.dtype))
    return dq, dk, dv
