"""Both passes of a rank as one differentiable torch operation over a process group."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from attnbench.kernels.ring.engine import Engine
from attnbench.kernels.ring.transport import GroupTransport

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1)
def autograd_function() -> Any:
    """`apply(q, k, v, engine, group, with_lse) -> (out, lse)`; the LSE has a gradient where it was asked for."""
    import torch

    from attnbench.impls.partial.torch_autograd import once

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
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            computed = partial(_gradients, ctx.engine, ctx.group, ctx.with_lse)
            return *once(computed, dout, dlse, *ctx.saved_tensors), None, None, None

    return Ring


def _gradients(
    engine: Engine,
    group: Any,
    with_lse: bool,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *own: torch.Tensor,
) -> tuple[Any, Any, Any]:
    import torch

    from attnbench.impls.partial.torch_autograd import of_both, through_lse

    transport = _transport(engine, group)
    of_out, of_lse = _asked(dout, dlse, engine, group, q.device) if with_lse else (True, False)
    if of_out and dout is None:
        dout = torch.zeros_like(out)
    if of_lse and dlse is None:
        dlse = torch.zeros_like(lse)
    return of_both(
        lambda dout: engine.backward((q, k, v), (out, lse, *own), dout, transport),
        lambda dlse: through_lse(
            engine.under_whole(transport), "bshd", q, k, v, out, lse, dlse, _common_excess(dlse, out, engine, group)
        ),
        dout,
        dlse if of_lse else None,
    )


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


def _common_excess(dlse: torch.Tensor, out: torch.Tensor, engine: Engine, group: Any) -> torch.Tensor | None:
    """In float16 the largest of all ranks, because dK is summed over them; None where each may take its own."""
    import torch
    import torch.distributed as dist

    from attnbench.impls.partial.torch_autograd import beyond_float16

    if out.dtype != torch.float16 or engine.problem.world == 1:
        return None
    excess = beyond_float16(dlse)
    dist.all_reduce(excess, dist.ReduceOp.MAX, group=group)
    return excess


def _transport(engine: Engine, group: Any) -> Any:
    """None for one rank, which never sends."""
    return GroupTransport(group) if engine.problem.world > 1 else None
