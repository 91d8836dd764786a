"""Dilated attention as one differentiable torch operation. This module imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attnbench.impls.partial.torch_autograd import Operation, of_both, once, through_lse
from attnbench.kernels.dilated.pieces import Task
from attnbench.kernels.dilated.torch_engines import ENGINES, Engine
from attnbench.kernels.dilated.torch_pieces import readable


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, engine: Engine, task: Task) -> tuple[Any, ...]:
    """Return the output and LSE of the whole, under which the backward pass runs every piece, and what it keeps."""
    out, lse, kept = engine.forward(task, q, k, v, True)
    return out, lse, *kept


def _keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    *arrays, ctx.engine, ctx.task = inputs
    ctx.save_for_backward(*arrays, *outputs)
    ctx.mark_non_differentiable(*outputs[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    return *once(partial(_gradients, ctx.engine, ctx.task), dout, dlse, *ctx.saved_tensors), None, None


def _gradients(
    engine: Engine,
    task: Task,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *kept: torch.Tensor,
) -> tuple[Any, Any, Any]:
    under_whole = partial(_under_whole, engine, task)
    return of_both(
        lambda dout: engine.backward(task, q, k, v, out, lse, dout.contiguous(), kept),
        lambda dlse: through_lse(under_whole, "bshd", q, k, v, out, lse, dlse.transpose(1, 2)),
        dout,
        dlse,
    )


_DILATED = Operation(_forward, _keep, _backward)


def _under_whole(engine: Engine, task: Task, *arrays: torch.Tensor) -> tuple[Any, Any, Any]:
    """Run the backward pass of every piece under a given output and LSE; the LSE is not a mixing weight."""
    return engine.backward(task, *arrays, ())


def dilated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, engine: str, task: Task
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [b, s, h, d], lse [b, h, s]) of arrays in layout bshd, by the engine of that name."""
    q, k, v = readable(q), readable(k), readable(v)
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if recorded or torch._C._are_functorch_transforms_active():  # vmap needs the operation's own rule
        out, lse, *_ = _DILATED(q, k, v, ENGINES[engine], task)
    else:
        out, lse, _ = ENGINES[engine].forward(task, q, k, v, False)
    return out, lse.transpose(1, 2)
