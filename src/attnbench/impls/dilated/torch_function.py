"""Dilated attention as one differentiable torch operation. This module needs torch, so it is imported on first use."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from attnbench.impls.dilated import torch_gathered, torch_strided
from attnbench.impls.dilated.task import Engine, Task
from attnbench.impls.dilated.torch_views import readable
from attnbench.impls.parts.torch_autograd import through_lse

ENGINES = {
    "gathered": Engine(torch_gathered.forward, torch_gathered.backward),
    "strided": Engine(torch_strided.forward, torch_strided.backward),
}


class _Dilated(torch.autograd.Function):
    """Saves out and LSE of the whole; the backward runs every piece under them, so no branch is mixed twice."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, engine: Engine, task: Task) -> Any:
        out, lse, kept = engine.forward(task, q, k, v, True)
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.engine, ctx.task = engine, task
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, *kept = ctx.saved_tensors
        grads: Any = (None, None, None)
        if dout is not None:
            grads = ctx.engine.backward(ctx.task, q, k, v, out, lse, dout.contiguous(), tuple(kept))
        if dlse is not None:
            under_whole = partial(_backward, ctx.engine, ctx.task)
            dq, dk, dv = through_lse(under_whole, "bshd", q, k, v, out, lse, dlse.transpose(1, 2))
            grads = (dq, dk, dv) if dout is None else (grads[0] + dq, grads[1] + dk, grads[2])
        return *grads, None, None


def _backward(engine: Engine, task: Task, *arrays: torch.Tensor) -> tuple[Any, Any, Any]:
    """Every piece under the output and LSE given, whatever weights are detached: the LSE is no mixing weight."""
    return engine.backward(task, *arrays, ())


def dilated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, engine: str, task: Task
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, s, h, d], lse [b, h, s]) of arrays in layout bshd."""
    q, k, v = readable(q), readable(k), readable(v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _Dilated.apply(q, k, v, ENGINES[engine], task)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        out, lse, _ = ENGINES[engine].forward(task, q, k, v, False)
    return out, lse.transpose(1, 2)
