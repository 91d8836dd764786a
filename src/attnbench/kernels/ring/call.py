"""A ring of processes as one differentiable call: shards go out, results come back, ranks time what lies between."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from attnbench.frameworks.base import Inputs, Stopwatch
from attnbench.kernels.ring import layouts, pool
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring.launcher import Reply
from attnbench.kernels.ring.settings import Settings, problem_of
from attnbench.spec import Pass, Workload

if TYPE_CHECKING:
    import torch

STEPS = Stopwatch()
"""Each step of a ring in this process: of the rank that took longest, all having started together."""
INSPECTION = 10.0
"""Timeouts that an inspection may take: it computes a dozen times."""
_numbers = count()


class RingCall:
    """`(q, k, v) -> out`, or (out, lse): whole arrays in, whole arrays out, bshd."""

    def __init__(self, workload: Workload, settings: Settings, method: str = "ring", with_lse: bool = False) -> None:
        self.workload, self.settings, self._method, self._with_lse = workload, settings, method, with_lse
        self.problem = problem_of(workload, settings.world, settings.layout)
        self._opened: pool.RingOfRanks | None = None
        self._number, self._forgotten = next(_numbers), []
        self.inner: tuple[str, ...] = ()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Differentiable; the LSE, float32, carries no gradient."""
        out, lse = _autograd_function().apply(q, k, v, self)
        return (out, lse.float()) if self._with_lse else out

    def forward(self, inputs: Sequence[torch.Tensor], kept: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse); the ranks keep their state under a number, where one is given."""
        replies = self._step(m.Forward(self._number, kept), self._shards(inputs))
        q = inputs[0]
        return self._gathered(replies, 0, "q", 1, q), self._gathered(replies, 1, "q", 2, q)

    def backward(self, kept: int, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of the forward pass that was kept."""
        shards = [(self._take(dout, "q", rank),) for rank in range(self.settings.world)]
        replies = self._step(m.Backward(kept), shards)
        dq, dk, dv = (self._gathered(replies, n, "q" if n == 0 else "kv", 1, dout) for n in range(3))
        return dq, dk, dv

    def inspect(self, inputs: Inputs, pass_: Pass) -> list[m.Inspected]:
        """Facts of each rank."""
        shards = self._shards(inputs[:3])
        shards = [(*three, self._take(inputs.dout, "q", rank)) for rank, three in enumerate(shards)]
        question = m.Inspect(self._number, pass_)
        replies = self._ring(inputs.q.device).ask([(question, arrays) for arrays in shards], INSPECTION)
        return [reply.answer for reply in replies if isinstance(reply.answer, m.Inspected)]

    def forget(self, kept: int) -> None:
        """Nobody will ask for this state again; the ranks hear of it with the next question."""
        self._forgotten.append(kept)

    def _step(self, question: m.Question, shards: Sequence[tuple[torch.Tensor, ...]]) -> list[Reply]:
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
        """The living ring, with this problem open in it."""
        import torch

        s = self.settings
        ring = pool.ring(s.world, device.type, torch.get_num_threads(), s.timeout_s)
        if ring is not self._opened:
            question = m.Open(self._number, self.problem, self.workload, s.inner, self._method)
            replies = ring.ask([(question, ())] * s.world)
            found = [name for reply in replies if isinstance(reply.answer, m.Ready) for name in reply.answer.inner]
            self._opened, self.inner = ring, tuple(dict.fromkeys(found))
        return ring

    def _shards(self, inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        names = ("q", "kv", "kv")
        world = self.settings.world
        return [tuple(self._take(x, n, rank) for x, n in zip(inputs, names)) for rank in range(world)]

    def _take(self, array: torch.Tensor, side: str, rank: int) -> torch.Tensor:
        return array.detach()[:, self._places(side, rank)]

    def _gathered(self, replies: Sequence[Reply], which: int, side: str, axis: int, like: torch.Tensor) -> torch.Tensor:
        """The ranks' arrays, every token in its place."""
        import torch

        parts = [reply.arrays[which] for reply in replies]
        shape = list(parts[0].shape)
        shape[axis] = self.workload.q_len if side == "q" else self.workload.kv_len
        whole = torch.empty(shape, dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            whole.index_copy_(axis, self._places(side, rank), part)
        return whole.to(like.device)

    def _places(self, side: str, rank: int) -> torch.Tensor:
        import torch

        length = self.workload.q_len if side == "q" else self.workload.kv_len
        return torch.from_numpy(layouts.positions(self.settings.layout, length, self.settings.world, rank))


class _Kept:
    """A state that the ranks hold as long as somebody may ask for its gradients."""

    def __init__(self, call: RingCall) -> None:
        self.call, self.number = call, next(_numbers)

    def __del__(self) -> None:
        self.call.forget(self.number)


@lru_cache(maxsize=1)
def _autograd_function() -> Any:
    import torch

    from attnbench.impls.partial.torch_autograd import once

    class OverRanks(torch.autograd.Function):
        """Both passes are computed by the ranks."""

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

    return OverRanks
