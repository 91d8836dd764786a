"""A whole ring as one differentiable torch call, and its measurement. This module imports torch.

Whole arrays are cut into shards, attended to, and put together again. `RingCall` has rank processes compute, which time
what lies between receiving and returning shards. `VirtualRing` computes the ranks in this process, one after the other,
which is all that one device can show of a ring: each rank's computation and memory are real, but no link is used, so
communication has no figure. `RingApparatus` measures one cell of several ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import count
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.frameworks.base import Clock, Inputs, OwnClock, Peak, Program, Programs, Stopwatch
from attnbench.frameworks.torch.framework import FRAMEWORK, TorchFramework
from attnbench.impls.partial.torch_autograd import once
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring import pool
from attnbench.kernels.ring.engine import RingEngine, Spans, VirtualTransport
from attnbench.kernels.ring.rank import TIMED_PASSES, OwnRing, program_of
from attnbench.kernels.ring.schedule import RingProblem, RingSettings, balance, positions, problem_of, shard_bytes
from attnbench.kernels.ring.work import Grads, Pair, TileKernels, pairs_of, pattern_of, work_of
from attnbench.spec import Call, Pass, Ranks, Workload

STEPS = Stopwatch()
"""Time of the steps of rings of processes: each from the common start to the end of the slowest rank."""
INSPECTION = 10.0
"""Timeouts that an inspection may take: it computes a dozen times."""
TOGETHER = "PyTorch's ring does not separate computation from communication, so their times are not known"
VIRTUAL = (
    "virtual ranks, one after the other on one device: compute and memory per rank are measured, communication is not"
)
Shard = tuple[Tensor, Tensor, Tensor]
Number = TypeVar("Number", int, float)
_numbers = count()


class _Whole(torch.autograd.Function):
    """Attention of whole arrays; the inputs are (q, k, v, call), the outputs (out, lse)."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: ShardedCall) -> Any:
        wanted = any(ctx.needs_input_grad)
        out, lse, ctx.state, arrays = call.forward((q, k, v), wanted)
        ctx.call = call
        if wanted:
            # The whole arrays too, so that a second derivative by them is refused.
            ctx.save_for_backward(q, k, v, *arrays)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *once(partial(ctx.call.backward, ctx.state), grads[0], *ctx.saved_tensors), None


class ShardedCall(ABC):
    """`(q, k, v) -> out`, or (out, lse), of whole arrays bshd."""

    def __init__(self, workload: Workload, settings: RingSettings, with_lse: bool = False) -> None:
        self.workload, self.settings, self._with_lse = workload, settings, with_lse
        self.problem = problem_of(workload, settings.world, settings.layout)
        self.inner: tuple[str, ...] = ()
        """Names of the kernels that were chosen, once they are known."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Compute attention, differentiable; the LSE, float32, carries no gradient."""
        out, lse = _Whole.apply(q, k, v, self)  # pyright: ignore[reportGeneralTypeIssues]
        return (out, lse.float()) if self._with_lse else out

    @abstractmethod
    def forward(self, inputs: Shard, wanted: bool) -> tuple[Tensor, Tensor, Any, Sequence[Tensor]]:
        """Return (out, lse), and what `backward` needs if a gradient is wanted: a state, and arrays to save."""

    @abstractmethod
    def backward(self, state: Any, dout: Tensor, *saved: Tensor) -> Grads:
        """Return (dq, dk, dv); `saved` are the whole inputs, then the saved arrays."""

    def shards(self, q: Tensor, k: Tensor, v: Tensor) -> list[Shard]:
        """Copy out the shards of each rank."""
        ranks = range(self.settings.world)
        return [(self.take(q, "q", rank), self.take(k, "kv", rank), self.take(v, "kv", rank)) for rank in ranks]

    def take(self, array: Tensor, side: str, rank: int) -> Tensor:
        """Copy out a rank's tokens; `side` is "q" or "kv"."""
        return array.detach().index_select(1, self.places(side, rank, array.device))

    def places(self, side: str, rank: int, device: torch.device) -> Tensor:
        return _places(self.problem, side, rank, device)


@lru_cache(maxsize=256)
def _places(problem: RingProblem, side: str, rank: int, device: torch.device) -> Tensor:
    length = problem.q_len if side == "q" else problem.kv_len
    return torch.from_numpy(positions(problem.layout, length, problem.world, rank)).to(device)


class _KeptState:
    """A state that the ranks hold until this object is collected."""

    def __init__(self, call: RingCall) -> None:
        self.call, self.number = call, next(_numbers)

    def __del__(self) -> None:
        self.call.forget(self.number)


class RingCall(ShardedCall):
    """A call over rank processes."""

    def __init__(
        self, workload: Workload, settings: RingSettings, method: str = "ring", with_lse: bool = False
    ) -> None:
        super().__init__(workload, settings, with_lse)
        self._method, self._number, self._forgotten = method, next(_numbers), []
        self._opened: pool.RingOfRanks | None = None

    def forward(self, inputs: Shard, wanted: bool) -> tuple[Tensor, Tensor, Any, Sequence[Tensor]]:
        state = _KeptState(self) if wanted else None
        question = m.Forward(self._number, -1 if state is None else state.number)
        replies, q = self._step(question, self.shards(*inputs)), inputs[0]
        return self._gathered(replies, 0, "q", 1, q), self._gathered(replies, 1, "q", 2, q), state, ()

    def backward(self, state: _KeptState, dout: Tensor, *saved: Tensor) -> Grads:
        shards = [(self.take(dout, "q", rank),) for rank in range(self.settings.world)]
        replies = self._step(m.Backward(state.number), shards)
        dq, dk, dv = (self._gathered(replies, n, "q" if n == 0 else "kv", 1, dout) for n in range(3))
        return dq, dk, dv

    def inspect(self, inputs: Inputs, pass_: Pass) -> list[m.Inspected]:
        shards = self.shards(*inputs[:3])
        question = m.Inspect(self._number, pass_)
        asked = [(question, (*shard, self.take(inputs.dout, "q", rank))) for rank, shard in enumerate(shards)]
        replies = self._ring(inputs.q.device).ask(asked, INSPECTION)
        return [reply.answer for reply in replies if isinstance(reply.answer, m.Inspected)]

    def forget(self, kept: int) -> None:
        """Let the ranks drop a kept state; they are informed before the next step."""
        self._forgotten.append(kept)

    def _step(self, question: m.Question, shards: Sequence[tuple[Tensor, ...]]) -> list[pool.Reply]:
        ring = self._ring(shards[0][0].device)
        if self._forgotten:
            forget = m.Forget(self._forgotten)
            self._forgotten = []
            ring.ask([(forget, ())] * ring.world)
        replies = ring.ask([(question, arrays) for arrays in shards])
        times = [reply.answer for reply in replies if isinstance(reply.answer, m.Stepped)]
        STEPS.ns += max(step.end_ns - step.start_ns for step in times)
        return replies

    def _ring(self, device: torch.device) -> pool.RingOfRanks:
        """Return the living ring, with this problem open in it."""
        s = self.settings
        ring = pool.ring(s.world, device.type, torch.get_num_threads(), s.timeout_s)
        if ring is not self._opened:
            question = m.OpenProblem(self._number, self.problem, self.workload, s.inner, self._method)
            replies = ring.ask([(question, ())] * s.world)
            names = [name for reply in replies if isinstance(reply.answer, m.Ready) for name in reply.answer.inner]
            self._opened, self.inner = ring, tuple(dict.fromkeys(names))
        return ring

    def _gathered(self, replies: Sequence[pool.Reply], which: int, side: str, axis: int, like: Tensor) -> Tensor:
        """Put the ranks' arrays together, every token in its place."""
        parts = [reply.arrays[which] for reply in replies]
        shape = list(parts[0].shape)
        shape[axis] = self.workload.q_len if side == "q" else self.workload.kv_len
        whole = torch.empty(shape, dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            whole.index_copy_(axis, self.places(side, rank, whole.device), part)
        return whole.to(like.device)


class VirtualRing(ShardedCall):
    """A call that computes the ranks' parts in turn."""

    def forward(self, inputs: Shard, wanted: bool) -> tuple[Tensor, Tensor, Any, Sequence[Tensor]]:
        (q, _, v), shards = inputs, self.shards(*inputs)
        pairs: list[Pair] = [(shard[1], shard[2]) for shard in shards]
        out, lse, saved = q.new_empty(*q.shape[:3], v.shape[-1]), torch.empty(0), []
        for rank, shard in enumerate(shards):
            engine, places = self.engine(rank, q.device), self.places("q", rank, q.device)
            part, part_lse, *own = engine.forward(*shard, VirtualTransport(pairs))
            self.inner = tuple(engine.work.kernels.used) or self.inner
            if not rank:
                lse = part_lse.new_empty(*part_lse.shape[:2], q.shape[1])
            out.index_copy_(1, places, part)
            lse.index_copy_(2, places, part_lse)
            saved += [*shard, part, part_lse, *own]
        return out, lse, None, saved

    def backward(self, state: None, dout: Tensor, *saved: Tensor) -> Grads:
        size = (len(saved) - 3) // self.settings.world
        by_rank = [saved[n : n + size] for n in range(3, len(saved), size)]
        pairs: list[Pair] = [(arrays[1], arrays[2]) for arrays in by_rank]
        sums: list[Pair | None] = [None] * len(by_rank)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])
        for rank, (q, k, v, *results) in enumerate(by_rank):
            engine, own_dout = self.engine(rank, q.device), self.take(dout, "q", rank)
            part = engine.backward((q, k, v), results, own_dout, VirtualTransport(pairs, sums))
            dq.index_copy_(1, self.places("q", rank, q.device), part[0])
            if len(by_rank) == 1:
                sums[0] = part[1], part[2]
        for rank, pair in enumerate(sums):
            assert pair is not None
            places = self.places("kv", rank, dk.device)
            dk.index_copy_(1, places, pair[0].to(dk.dtype))
            dv.index_copy_(1, places, pair[1].to(dv.dtype))
        return dq, dk, dv

    def engine(self, rank: int, device: torch.device) -> RingEngine:
        """Return a rank's plan and kernels, made once."""
        return _engine(self.workload, self.problem, rank, self.settings.inner, device)

    def inspect(self, inputs: Inputs, pass_: Pass) -> list[m.Inspected]:
        """Return the figures of each rank: memory and compute time, each rank by itself."""
        return [self._measured(inputs, pass_, rank) for rank in range(self.settings.world)]

    def _measured(self, inputs: Inputs, pass_: Pass, rank: int) -> m.Inspected:
        """Measure the extra memory at the peak of one rank's part, and its compute time."""
        shards, device = self.shards(*inputs[:3]), inputs.q.device
        pairs: list[Pair] = [(k, v) for _, k, v in shards]
        own = Inputs(*shards[rank], self.take(inputs.dout, "q", rank))
        method = OwnRing(self.engine(rank, device), VirtualTransport(pairs))
        peak = FRAMEWORK.peak(program_of(method, pass_), own, device.type, None)
        times = []
        for _ in range(TIMED_PASSES):
            spans = Spans(device.type)
            program = program_of(method, pass_, spans)
            program.run(program.prepare(own))
            times.append(spans.ns["compute"])
        return m.Inspected(
            compute_ns=float(median(times)),
            peak_bytes=peak.bytes,
            peak_reason=peak.reason,
            peak_method=peak.method,
        )


@registry.cached(64)
def _engine(workload: Workload, problem: RingProblem, rank: int, inner: str, device: torch.device) -> RingEngine:
    kernels = TileKernels(workload, inner, device)
    return RingEngine(problem, rank, work_of(problem, rank, kernels, pattern_of(workload)))


class OverRanks:
    """A call over rank processes, or over virtual ranks if there are fewer accelerators than ranks."""

    def __init__(self, processes: RingCall, virtual: VirtualRing | None = None) -> None:
        self.processes, self.virtual = processes, virtual

    def on(self, device: str) -> RingCall | VirtualRing:
        """Return the call that a device gets."""
        if self.virtual is not None and is_virtual(device, self.processes.settings.world):
            return self.virtual
        return self.processes

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.on(q.device.type)(q, k, v)


def is_virtual(device: str, world: int) -> bool:
    """Return whether ranks are virtual: one accelerator takes one rank of a process group, so more ranks are."""
    return device != "cpu" and torch.get_device_module(device).device_count() < world


class RingApparatus(TorchFramework):
    """TorchFramework for one cell over several ranks: clocks, memory and kernels are those of the ranks."""

    def __init__(self, world: int, can_be_virtual: bool) -> None:
        self._world, self._can_be_virtual = world, can_be_virtual
        self._calls: dict[int, tuple[OverRanks, Pass]] = {}
        self._seen: dict[int, list[m.Inspected]] = {}

    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        programs = super().programs(call, pass_, example)
        if isinstance(call, OverRanks):
            self._calls[id(programs.main)] = (call, pass_)
        return programs

    def _virtual(self, device: str) -> bool:
        return self._can_be_virtual and is_virtual(device, self._world)

    def clocks(self, device: str) -> tuple[str, ...]:
        return super().clocks(device) if self._virtual(device) else (OwnClock.name,)

    def clock(self, name: str, device: str) -> Clock:
        if self._virtual(device):
            return super().clock(name, device)
        if name != OwnClock.name:
            raise UsageError(f'a ring is timed by its ranks: its only clock is "{OwnClock.name}", not "{name}".')
        return OwnClock(self, STEPS)

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        """Return the peak of the rank that needs the most memory."""
        figures = self._figures(program, inputs, device)
        known = [rank.peak_bytes for rank in figures if rank.peak_bytes is not None]
        if len(known) < len(figures):
            return Peak(None, next(rank.peak_reason for rank in figures if rank.peak_bytes is None))
        return Peak(max(known), method=f"the largest of {len(figures)} ranks; {figures[0].peak_method}")

    def kernels(self, program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
        if self._virtual(device):
            return super().kernels(program, inputs, device)
        figures = self._figures(program, inputs, device)
        names = [name for rank in figures for name in rank.kernels or ()]
        return (list(dict.fromkeys(names)), None) if names else (None, figures[0].kernels_reason)

    def ranks(self, program: Program, inputs: Inputs, device: str) -> Ranks | None:
        call, figures = self._calls[id(program)][0].on(device), self._figures(program, inputs, device)
        virtual = isinstance(call, VirtualRing)
        backend = "gloo" if device == "cpu" else "nccl"
        compute = _all(rank.compute_ns for rank in figures)
        work = pairs_of(call.workload, call.problem)
        return Ranks(
            world=call.settings.world,
            how="virtual" if virtual else f"processes over {backend}{', by torchrun' if pool.adopted() else ''}",
            layout=call.settings.layout,
            inner=call.inner,
            devices=1 if device == "cpu" or virtual else call.settings.world,
            tokens=call.problem.q_sizes(),
            pairs=work,
            shard_bytes=shard_bytes(call.workload, call.problem),
            peak_bytes=_all(rank.peak_bytes for rank in figures),
            compute_ns=compute,
            waiting_ns=_all(rank.waiting_ns for rank in figures),
            communication_ns=_all(rank.communication_ns for rank in figures),
            balance=balance(compute or work),
            reason=VIRTUAL if virtual else TOGETHER if compute is None else None,
        )

    def _figures(self, program: Program, inputs: Inputs, device: str) -> list[m.Inspected]:
        """Return the figures of each rank, measured once for each program."""
        if id(program) not in self._seen:
            call, pass_ = self._calls[id(program)]
            self._seen[id(program)] = call.on(device).inspect(inputs, pass_)
        return self._seen[id(program)]


def _all(values: Iterable[Number | None]) -> tuple[Number, ...] | None:
    """Return a figure of every rank, or None if one is missing."""
    known = tuple(values)
    return None if None in known else known  # pyright: ignore[reportReturnType]
