"""The improved way: kernels read strided views of Q, K and V, so nothing is gathered, and partial results are merged in
one pass over the output (Triton on a GPU; piece by piece elsewhere), without a full-size copy a branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.impls.partial.torch_passes import merge_
from attnbench.kernels.dilated.torch_plan import Plan, plan_of
from attnbench.kernels.dilated.torch_views import dense_strides, keys_of, nothing_merged, queries_of, rows_of

if TYPE_CHECKING:
    import torch

    from attnbench.kernels.dilated.task import Forward, Task

    Parts = list[tuple[torch.Tensor, ...]]


def forward(task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Forward:
    """(out, lse [b, s, h], and with `keep` what the backward wants: own outputs of branches, the LSE by pieces)."""
    plan = plan_of(task, q, k, v)
    parts = [step.forward(step.q.of(q), step.k.of(k), step.v.of(v)) for step in plan.steps]
    if plan.fused is None:
        out, lse = _merged(plan, parts, q, v)
        return out, lse, _own_outputs(task, plan, parts, out) if keep and task.detached else ()
    out, lse = plan.fused.merged(parts, plan.out_shape, keep)
    if not keep:
        return out, lse, ()
    own = _own_outputs(task, plan, parts, out) if task.detached else ()
    return out, lse, (*own, *[part for _, part in parts])


def _merged(plan: Plan, parts: Parts, q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = nothing_merged(q, v)
    for step, (part, part_lse) in zip(plan.steps, parts):
        merge_(queries_of(out, step.piece), rows_of(lse, step.piece), part.transpose(1, 2), part_lse)
    return out.to(q.dtype), lse


def _own_outputs(task: Task, plan: Plan, parts: Parts, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each branch's output, laid out as the whole's: a backward then meets the strides that it meets everywhere."""
    own = tuple(out.new_zeros(out.shape) for _ in task.problem.pattern.segment_lengths)
    for step, (part, _) in zip(plan.steps, parts):
        step.out.of(own[step.piece.branch]).copy_(part)
    return own


def backward(
    task: Task,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients, each piece under the whole's LSE and output (its branch's own output where weights are detached)."""
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
    return _added(plan, parts, q, k, v) if plan.fused is None else plan.fused.added(parts, q, k, v)


def _laid_out(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The array with those strides, which are a new one's: `contiguous` may leave any on an axis of 1."""
    return x if x.stride() == strides else x.new_empty(x.shape).copy_(x)


def _added(
    plan: Plan, parts: Parts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    totals = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
    for step, part in zip(plan.steps, parts):
        for total, gradient, view in zip(totals, part, (queries_of, keys_of, keys_of)):
            view(total, step.piece).add_(gradient.transpose(1, 2))
    dq, dk, dv = (total.to(q.dtype) for total in totals)
    return dq, dk, dv
