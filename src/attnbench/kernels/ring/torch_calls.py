"""A whole ring as one differentiable torch call: whole arrays are cut into shards, attended to, and put together again.

`RingCall` has rank processes compute, which time what lies between receiving and returning shards. `VirtualRing`
computes the ranks in this process, one after the other, which is all that one device can show of a ring: each rank's
computation and memory are real, but no link is used, so communication has no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

from attnbench.frameworks.base import Inputs, Peak, Stopwatch
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring import pool
from attnbench.kernels.ring.dilated_work import pattern_of, work_of
from attnbench.kernels.ring.engine import Engine, Spans, VirtualTransport
from attnbench.kernels.ring.rank import TIMED_PASSES, Ours, peak_of, program_of
from attnbench.kernels.ring.schedule import Problem, positions
from attnbench.kernels.ring.settings import Settings, problem_of
from attnbench.kernels.ring.work import Kernels, Pair
from attnbench.spec import Pass, Workload

if TYPE_CHECKING:
    import torch

STEPS = Stopwatch()
"""Time of the steps of rings of processes: each from the common start to the end of the slowest rank."""
INSPECTION = 10.0
"""Timeouts that an inspection may take: it computes a dozen times."""
Shard = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
_numbers = count()


class ShardedCall:
    """`(q, k, v) -> out`, or (out, lse), of whole arrays bshd."""

    def __init__(self, workload: Workload, settings: Settings, with_lse: bool) -> None:
        self.workload, self.settings, self._with_lse = workload, settings, with_lse
        self.problem = problem_of(workload, settings.world, settings.layout)
        self.inner: tuple[str, ...] = ()
        """Names of the kernels that were chosen, once they are known."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Compute attention, differentiable; the LSE, float32, carries no gradient."""
        out, lse = self._operation()(q, k, v, self)
        return (out, lse.float()) if self._with_lse else out

    def _operation(self) -> Callable[..., Any]:
        raise NotImplementedError

    def shards(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Shard]:
        """Copy out the shards of each rank."""
        sides = ((q, "q"), (k, "kv"), (v, "kv"))
        q_, k_, v_ = ([self.take(x, side, rank) for rank in range(self.settings.world)] for x, side in sides)
        return list(zip(q_, k_, v_))

    def take(self, array: torch.Tensor, side: str, rank: int) -> torch.Tensor:
        """Copy out a rank's tokens; `side` is "q" or "kv"."""
        return array.detach().index_select(1, self.places(side, rank, array.device))

    def places(self, side: str, rank: int, device: torch.device) -> torch.Tensor:
        """Return the positions of a rank's tokens."""
        return _places(self.problem, side, rank, device)


@lru_cache(maxsize=256)
def _places(problem: Problem, side: str, rank: int, device: torch.device) -> torch.Tensor:
    import torch

    length = problem.q_len if side == "q" else problem.kv_len
    return torch.from_numpy(positions(problem.layout, length, problem.world, rank)).to(device)


class RingCall(ShardedCall):
    """A call over rank processes."""

    def __init__(self, workload: Workload, settings: Settings, method: str = "ring", with_lse: bool = False) -> None:
        super().__init__(workload, settings, with_lse)
        self._method, self._number, self._forgotten = method, next(_numbers), []
        self._opened: pool.RingOfRanks | None = None

    def _operation(self) -> Callable[..., Any]:
        return _over_processes().apply

    def forward(self, inputs: Shard, kept: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse); the ranks keep their state under the number `kept` unless it is -1."""
        replies, q = self._step(m.Forward(self._number, kept), self.shards(*inputs)), inputs[0]
        return self._gathered(replies, 0, "q", 1, q), self._gathered(replies, 1, "q", 2, q)

    def backward(self, kept: int, dout: torch.Tensor) -> Shard:
        """Return (dq, dk, dv) of the forward pass that was kept."""
        shards = [(self.take(dout, "q", rank),) for rank in range(self.settings.world)]
        replies = self._step(m.Backward(kept), shards)
        dq, dk, dv = (self._gathered(replies, n, "q" if n == 0 else "kv", 1, dout) for n in range(3))
        return dq, dk, dv

    def inspect(self, inputs: Inputs, pass_: Pass) -> list[m.Inspected]:
        """Return the figures of each rank."""
        shards = self.shards(*inputs[:3])
        shards = [(*three, self.take(inputs.dout, "q", rank)) for rank, three in enumerate(shards)]
        question = m.Inspect(self._number, pass_)
        replies = self._ring(inputs.q.device).ask([(question, arrays) for arrays in shards], INSPECTION)
        return [reply.answer for reply in replies if isinstance(reply.answer, m.Inspected)]

    def forget(self, kept: int) -> None:
        """Let the ranks drop a kept state; they are informed before the next step."""
        self._forgotten.append(kept)

    def _step(self, question: m.Question, shards: Sequence[tuple[torch.Tensor, ...]]) -> list[pool.Reply]:
        ring = self._ring(shards[0][0].device)
        if self._forgotten:
            forget = m.Forget(self._forgotten)
            self._forgotten = []
            ring.ask([(forget, ())] * ring.world)
        replies = ring.ask([(question, arrays) for arrays in shards])
        times = [reply.answer for reply in replies if isinstance(reply.answer, m.Stepped)]
        STEPS.ns += max(one.end_ns - one.start_ns for one in times)
        return replies

    def _ring(self, device: torch.device) -> pool.RingOfRanks:
        """Return the living ring, with this problem open in it."""
        import torch

        s = self.settings
        ring = pool.ring(s.world, device.type, torch.get_num_threads(), s.timeout_s)
        if ring is not self._opened:
            question = m.Open(self._number, self.problem, self.workload, s.inner, self._method)
            replies = ring.ask([(question, ())] * s.world)
            found = [name for reply in replies if isinstance(reply.answer, m.Ready) for name in reply.answer.inner]
            self._opened, self.inner = ring, tuple(dict.fromkeys(found))
        return ring

    def _gathered(
        self, replies: Sequence[pool.Reply], which: int, side: str, axis: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Put the ranks' arrays together, every token in its place."""
        import torch

        parts = [reply.arrays[which] for reply in replies]
        shape = list(parts[0].shape)
        shape[axis] = self.workload.q_len if side == "q" else self.workload.kv_len
        whole = torch.empty(shape, dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            whole.index_copy_(axis, self.places(side, rank, whole.device), part)
        return whole.to(like.device)


class _Kept:
    """A state that the ranks hold until this object is collected."""

    def __init__(self, call: RingCall) -> None:
        self.call, self.number = call, next(_numbers)

    def __del__(self) -> None:
        self.call.forget(self.number)


@lru_cache(maxsize=1)
def _over_processes() -> Any:
    import torch

    from attnbench.impls.partial.torch_autograd import once

    class OverProcesses(torch.autograd.Function):
        """Attention whose passes are computed by rank processes."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, call: RingCall) -> Any:
            kept = _Kept(call) if any(ctx.needs_input_grad) else None
            out, lse = call.forward((q, k, v), -1 if kept is None else kept.number)
            ctx.kept = kept
            if kept is not None:
                ctx.save_for_backward(q, k, v)  # only so that a second derivative by them is refused
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            kept = ctx.kept
            return *once(lambda dout, *_: kept.call.backward(kept.number, dout), grads[0], *ctx.saved_tensors), None

    return OverProcesses


class VirtualRing(ShardedCall):
    """A call that computes the ranks' parts in turn."""

    def __init__(self, workload: Workload, settings: Settings, with_lse: bool = False) -> None:
        super().__init__(workload, settings, with_lse)

    def _operation(self) -> Callable[..., Any]:
        return _in_turn().apply

    def engine(self, rank: int, device: torch.device) -> Engine:
        """Return a rank's plan and kernels, made once."""
        return _engine(self.workload, self.problem, rank, self.settings.inner, device)

    def inspect(self, inputs: Inputs, pass_: Pass) -> list[m.Inspected]:
        """Return the figures of each rank: memory and compute time, each rank by itself."""
        found = []
        for rank in range(self.settings.world):
            peak, compute_ns = self._measured(inputs, pass_, rank)
            found.append(
                m.Inspected(
                    compute_ns=compute_ns,
                    peak_bytes=peak.bytes,
                    peak_reason=peak.reason,
                    peak_method=peak.method,
                )
            )
        return found

    def _measured(self, inputs: Inputs, pass_: Pass, rank: int) -> tuple[Peak, float]:
        """Measure the extra memory at the peak of one rank's part, and its compute time in ns."""
        shards, device = self.shards(*inputs[:3]), inputs.q.device
        held: list[Pair] = [(k, v) for _, k, v in shards]
        (q, k, v), dout = shards[rank], self.take(inputs.dout, "q", rank)
        method, mine = Ours(self.engine(rank, device), VirtualTransport(held)), Inputs(q, k, v, dout)
        peak = peak_of(program_of(method, pass_), mine, device)
        times = []
        for _ in range(TIMED_PASSES):
            spans = Spans(device.type)
            program = program_of(method, pass_, spans)
            program.run(program.prepare(mine))
            times.append(spans.ns["compute"])
        return peak, float(median(times))


@lru_cache(maxsize=64)
def _engine(workload: Workload, problem: Problem, rank: int, inner: str, device: torch.device) -> Engine:
    return Engine(problem, rank, work_of(problem, rank, Kernels(workload, inner, device), pattern_of(workload)))


@lru_cache(maxsize=1)
def _in_turn() -> Any:
    import torch

    from attnbench.impls.partial.torch_autograd import once

    class InTurn(torch.autograd.Function):
        """Attention whose passes are computed for one rank after the other."""

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
    """Return the gradients of the whole arrays, the first three saved; each rank's shards and results follow them."""
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
