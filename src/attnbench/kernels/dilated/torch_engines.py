"""Dilated attention as one differentiable torch operation, computed in one of two ways. This module imports torch.

gathered: copy each branch's tokens out, attend, scatter back, and mix all branches at the end. Every branch's output
lies in memory at full size in float32 until it is mixed.

strided: kernels read strided views of Q, K and V, so nothing is gathered, and partial results are merged in one pass
over the output (Triton on a GPU; piece by piece elsewhere), without a full-size copy for each branch. What depends on
shapes and strides alone is a plan, made once: a call only takes its views, runs its dense kernels and merges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench import masks, registry
from attnbench.impls.partial.torch_autograd import Operation, of_both, once, through_lse, turned
from attnbench.impls.partial.torch_choice import Rules, choose, current
from attnbench.impls.partial.torch_passes import NEGATIVE_INFINITY, merge_, nothing_yet
from attnbench.kernels.dilated.pieces import (
    DilatedPiece,
    StridedView,
    Task,
    dense_strides,
    fold,
    folds,
    key_view,
    keys_of,
    pieces,
    queries_of,
    query_view,
    readable,
    rows_of,
)
from attnbench.kernels.dilated.torch_fused import Fused, is_fused
from attnbench.spec import Partial, Workload

Forward = tuple[Tensor, Tensor, tuple[Tensor, ...]]
"""Output [b, s, h, d], LSE [b, s, h] in float32 (float64 for float64 inputs), and what else the backward needs."""
Parts = list[tuple[Tensor, ...]]


class DilatedEngine(NamedTuple):
    """A way to compute a task on torch arrays, without autograd."""

    forward: Callable[..., Forward]
    backward: Callable[..., tuple[Any, Any, Any]]


def nothing_merged(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [b, s, h, d], lse [b, s, h]) before any piece is merged, in the precision that merging takes."""
    out, lse = nothing_yet((*q.shape[:3], v.shape[-1]), q.dtype, q.device)
    return out, lse.view(q.shape[:3])


@registry.cached(4096)
def partial_of(
    kernel: str, scale: float, piece: DilatedPiece, dims: tuple[int, int], dtype: torch.dtype, device: torch.device,
    rules: Rules,
) -> Partial:  # fmt: skip
    """Return (forward, backward), bshd, for a piece; `dims` are those of keys and of values.

    `kernel` is an implementation's name or "auto".
    """
    workload = Workload(
        batch=piece.stack, q_len=piece.queries, kv_len=piece.keys, heads=piece.heads.number,
        kv_heads=piece.heads.kv_number, head_dim=dims[0], v_head_dim=dims[1], dtype=str(dtype).removeprefix("torch."),
        mask=masks.causal() if piece.causal else masks.full(), scale=scale, pass_="train",
    )  # fmt: skip
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    return choose(kernel, workload, kind, rules)[1]


def gathered_forward(task: Task, q: Tensor, k: Tensor, v: Tensor, keep: bool) -> Forward:
    """Return (out, lse [b, s, h], each branch's own output if the backward pass needs it)."""
    branches = [nothing_merged(q, v) for _ in task.problem.pattern.segment_lengths]
    rules, dims = current(), (q.shape[-1], v.shape[-1])
    for piece in pieces(task.problem, folds(q, k, v), diagonal=False):
        a, b, c = queries_of(q, piece).contiguous(), *(keys_of(x, piece).contiguous() for x in (k, v))
        kernel = partial_of(task.kernel, task.scale, piece, dims, q.dtype, q.device, rules)
        part, part_lse = kernel[0](a, b, c)
        out, lse = branches[piece.branch]
        queries_of(out, piece).copy_(part)
        rows_of(lse, piece).copy_(part_lse)
    out, lse = mixed([(branch_out, branch_lse.transpose(1, 2)) for branch_out, branch_lse in branches])
    apart = keep and task.detached and len(branches) > 1
    kept = tuple(branch_out.to(q.dtype) for branch_out, _ in branches) if apart else ()
    return out.to(q.dtype), lse.transpose(1, 2).contiguous(), kept


def mixed(sums: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mix results (out [b, t, h, d], lse [b, h, t]) by their softmax denominators; return (out, lse)."""
    if len(sums) == 1:
        return sums[0]
    lse = torch.logsumexp(torch.stack([part_lse for _, part_lse in sums]), 0)
    base = lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0)
    out = torch.zeros_like(sums[0][0])
    for part, part_lse in sums:
        out.addcmul_(part, torch.exp(part_lse - base).transpose(1, 2).unsqueeze(-1))
    return out, lse


def gathered_backward(
    task: Task, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv): each piece under the LSE and output of the whole, or its branch's own output if detached."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    rules, dims = current(), (q.shape[-1], v.shape[-1])
    for piece in pieces(task.problem, folds(q, k, v, out, lse, dout), diagonal=False):
        rows = (q, kept[piece.branch] if kept else out, dout)
        a, whole, cotangent = (queries_of(x, piece).contiguous() for x in rows)
        b, c = (keys_of(x, piece).contiguous() for x in (k, v))
        kernel = partial_of(task.kernel, task.scale, piece, dims, q.dtype, q.device, rules)
        parts = kernel[1](a, b, c, whole, rows_of(lse, piece).contiguous(), cotangent)
        for total, part, view in zip((dq, dk, dv), parts, (queries_of, keys_of, keys_of)):
            view(total, piece).add_(part)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


PLANS = 64
"""Number of plans kept; each may have small tables on its device."""
_captured: dict[int, TaskPlan] = {}
"""Plans of captured calls, kept forever: a CUDA graph reads their tables at every replay."""


class DilatedStep(NamedTuple):
    """One dense call: views, heads first, of the arrays it reads, and the two passes of its kernel."""

    piece: DilatedPiece
    q: StridedView
    k: StridedView
    v: StridedView
    out: StridedView
    """View of out and dout."""
    lse: StridedView
    """View [stack, heads, queries] of an LSE [b, s, h]."""
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class TaskPlan(NamedTuple):
    """Steps of a task, the strides that out and dout must have, and the fused merge (None: piece by piece)."""

    steps: tuple[DilatedStep, ...]
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    fused: Fused | None


def plan_of(task: Task, q: Tensor, k: Tensor, v: Tensor) -> TaskPlan:
    """Return the plan for arrays of these shapes and strides."""
    strides = (q.stride(), k.stride(), v.stride())
    plan = _plan(task, q.dtype, q.device, (q.shape, k.shape, v.shape), strides, current())
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[id(plan)] = plan
    return plan


@registry.cached(PLANS)
def _plan(
    task: Task, dtype: torch.dtype, device: torch.device, shapes: Sequence[Sequence[int]], strides: Sequence[Any],
    rules: Rules,
) -> TaskPlan:  # fmt: skip
    """Make a plan whose kernels were chosen under these rules."""
    folds = all(fold(shape, stride) for shape, stride in zip(shapes, strides))
    plan = pieces(task.problem, folds, task.diagonal)
    head_dim, value_dim = shapes[0][-1], shapes[2][-1]
    out_shape = (*shapes[0][:3], value_dim)
    out_strides, row_strides = dense_strides(out_shape), (*dense_strides(out_shape[:3]), 1)
    steps = []
    for piece in plan:
        views = (
            query_view(piece, strides[0], head_dim), key_view(piece, strides[1], head_dim),
            key_view(piece, strides[2], value_dim), query_view(piece, out_strides, value_dim),
            query_view(piece, row_strides, 1).without_dim(),
        )  # fmt: skip
        pair = partial_of(task.kernel, task.scale, piece, (head_dim, value_dim), dtype, device, rules)
        steps.append(DilatedStep(piece, *views, *turned(pair)))
    fused = Fused(task.problem, folds, task.diagonal, len(plan)) if is_fused(task, dtype, device) else None
    return TaskPlan(tuple(steps), out_shape, out_strides, fused)


def strided_forward(task: Task, q: Tensor, k: Tensor, v: Tensor, keep: bool) -> Forward:
    """Return (out, lse [b, s, h], and with `keep` what the backward needs: branches' own outputs, pieces' LSEs)."""
    plan = plan_of(task, q, k, v)
    parts = [step.forward(step.q.of(q), step.k.of(k), step.v.of(v)) for step in plan.steps]
    if plan.fused is None:
        out, lse = nothing_merged(q, v)
        for step, (part, part_lse) in zip(plan.steps, parts):
            merge_(queries_of(out, step.piece), rows_of(lse, step.piece), part.transpose(1, 2), part_lse)
        out = out.to(q.dtype)
        return out, lse, _own_outputs(task, plan, parts, out) if keep and task.detached else ()
    out, lse = plan.fused.merged(parts, plan.out_shape, keep)
    if not keep:
        return out, lse, ()
    own = _own_outputs(task, plan, parts, out) if task.detached else ()
    return out, lse, (*own, *[part for _, part in parts])


def _own_outputs(task: Task, plan: TaskPlan, parts: Parts, out: Tensor) -> tuple[Tensor, ...]:
    """Return each branch's output with the strides of the whole's, which the backward pass expects."""
    own = tuple(out.new_zeros(out.shape) for _ in task.problem.pattern.segment_lengths)
    for step, (part, _) in zip(plan.steps, parts):
        step.out.of(own[step.piece.branch]).copy_(part)
    return own


def strided_backward(
    task: Task, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv): each piece under the LSE and output of the whole, or its branch's own output if detached."""
    plan = plan_of(task, q, k, v)
    branches = len(task.problem.pattern.segment_lengths) if task.detached and kept else 0
    own, lses = kept[:branches], kept[branches:]
    out, dout = _laid_out(out, plan.out_strides), _laid_out(dout, plan.out_strides)
    if not lses:
        lse = _laid_out(lse, dense_strides(lse.shape))
        lses = [step.lse.of(lse) for step in plan.steps]
    parts = []
    for step, part_lse in zip(plan.steps, lses):
        whole = step.out.of(own[step.piece.branch] if own else out)
        parts.append(step.backward(step.q.of(q), step.k.of(k), step.v.of(v), whole, part_lse, step.out.of(dout)))
    if plan.fused is not None:
        return plan.fused.added(parts, q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    totals = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
    for step, part in zip(plan.steps, parts):
        for total, gradient, view in zip(totals, part, (queries_of, keys_of, keys_of)):
            view(total, step.piece).add_(gradient.transpose(1, 2))
    dq, dk, dv = (total.to(q.dtype) for total in totals)
    return dq, dk, dv


def _laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the array with the strides of a new array: `contiguous` may leave any stride on an axis of 1."""
    return x if x.stride() == strides else x.new_empty(x.shape).copy_(x)


ENGINES = {
    "gathered": DilatedEngine(gathered_forward, gathered_backward),
    "strided": DilatedEngine(strided_forward, strided_backward),
}


def _forward(q: Tensor, k: Tensor, v: Tensor, engine: DilatedEngine, task: Task) -> tuple[Any, ...]:
    """Return the output and LSE of the whole, under which the backward pass runs every piece, and what it keeps."""
    out, lse, kept = engine.forward(task, q, k, v, True)
    return out, lse, *kept


def _keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    *arrays, ctx.engine, ctx.task = inputs
    ctx.save_for_backward(*arrays, *outputs)
    ctx.mark_non_differentiable(*outputs[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    return *once(partial(_gradients, ctx.engine, ctx.task), dout, dlse, *ctx.saved_tensors), None, None


def _gradients(
    engine: DilatedEngine, task: Task, dout: Tensor | None, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *kept: Tensor,
) -> tuple[Any, Any, Any]:  # fmt: skip
    def under_whole(*arrays: Tensor) -> tuple[Any, Any, Any]:
        return engine.backward(task, *arrays, ())  # under a given output and LSE, which is not a mixing weight

    return of_both(
        lambda dout: engine.backward(task, q, k, v, out, lse, dout.contiguous(), kept),
        lambda dlse: through_lse(under_whole, "bshd", q, k, v, out, lse, dlse.transpose(1, 2)),
        dout,
        dlse,
    )


_DILATED = Operation(_forward, _keep, _backward)


def dilated(q: Tensor, k: Tensor, v: Tensor, engine: str, task: Task) -> tuple[Tensor, Tensor]:
    """Compute (out [b, s, h, d], lse [b, h, s]) of arrays in layout bshd, by the engine of that name."""
    q, k, v = readable(q), readable(k), readable(v)
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if recorded or torch._C._are_functorch_transforms_active():  # vmap needs the operation's own rule
        out, lse, *_ = _DILATED(q, k, v, ENGINES[engine], task)
    else:
        out, lse, _ = ENGINES[engine].forward(task, q, k, v, False)
    return out, lse.transpose(1, 2)
