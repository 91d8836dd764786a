"""Both passes of a rank as one differentiable torch operation over a process group."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attnbench.impls.ring.engine import Engine
from attnbench.impls.ring.transport import GroupTransport

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1)
def autograd_function() -> Any:
    """`apply(q, k, v, engine, group, with_lse) -> (out, lse)`; the LSE has a gradient where it was asked for."""
    import torch
    from torch.autograd.function import once_differentiable

    from attnbench.impls.parts.torch_autograd import through_lse

    class Ring(torch.autograd.Function):
        """Forward sends K and V round, backward sends them again with the sums of their gradients."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, engine: Engine, group: Any, with_lse: bool) -> Any:
            transport = _transport(engine, group)
            out, lse, *own = engine.forward(q, k, v, transport)
            ctx.save_for_backward(q, k, v, out, lse, *own)
            ctx.engine, ctx.group, ctx.with_lse = engine, group, with_lse
            ctx.set_materialize_grads(False)
            if not with_lse:
                ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            q, k, v, out, lse, *own = ctx.saved_tensors
            transport = _transport(ctx.engine, ctx.group)
            of_out, of_lse = _asked(dout, dlse, ctx.engine, ctx.group, q.device) if ctx.with_lse else (True, False)
            grads: Any = (None, None, None)
            if of_out:
                dout = torch.zeros_like(out) if dout is None else dout
                grads = ctx.engine.backward((q, k, v), (out, lse, *own), dout, transport)
            if of_lse:
                dlse = torch.zeros_like(lse) if dlse is None else dlse
                backward = ctx.engine.under_whole(transport)
                dq, dk, dv = through_lse(backward, "bshd", q, k, v, out, lse, dlse)
                grads = (grads[0] + dq, grads[1] + dk, grads[2]) if of_out else (dq, dk, dv)
            return *grads, None, None, None

    return Ring


def _asked(dout: Any, dlse: Any, engine: Engine, group: Any, device: torch.device) -> tuple[bool, bool]:
    """Whether any rank wants the gradient of the output, and of the LSE: all must then take part in it."""
    import torch
    import torch.distributed as dist

    wanted = [dout is not None, dlse is not None]
    if engine.problem.world > 1:
        flags = torch.tensor(wanted, dtype=torch.int32, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        wanted = [bool(flag) for flag in flags.tolist()]
    return wanted[0], wanted[1]


def _transport(engine: Engine, group: Any) -> Any:
    """None for one rank, which never sends."""
    return GroupTransport(group) if engine.problem.world > 1 else None
