"""The improved way: kernels read strided views of Q, K and V, so nothing is gathered, and partial results are merged in
one pass over the output (Triton on a GPU; piece by piece elsewhere), without a full-size copy a branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.impls.dilated.pieces import Piece, pieces
from attnbench.impls.dilated.torch_fused import added, is_fused, merged
from attnbench.impls.dilated.torch_kernels import partial_of
from attnbench.impls.dilated.torch_views import folds, key_view, nothing_merged, query_view, row_view
from attnbench.impls.parts.torch_merge import merge_

if TYPE_CHECKING:
    import torch

    from attnbench.impls.dilated.task import Forward, Task

    Parts = list[tuple[torch.Tensor, ...]]


def forward(task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Forward:
    """(out, lse [b, s, h], each branch's own output where the backward will want it)."""
    fold, parts = folds(q, k, v), []
    plan = pieces(task.problem, fold, task.diagonal)
    for piece in plan:
        views = query_view(q, piece), key_view(k, piece), key_view(v, piece)
        parts.append(partial_of(task.kernel, *views, piece.causal, task.scale)[0](*views))
    out, lse = merged(task, fold, parts, q, v) if is_fused(task, q) else _merged(plan, parts, q, v)
    return out, lse, _own_outputs(task, plan, parts, out) if task.detached else ()


def _merged(
    plan: tuple[Piece, ...], parts: Parts, q: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = nothing_merged(q, v)
    for piece, (part, part_lse) in zip(plan, parts):
        merge_(query_view(out, piece), row_view(lse, piece), part, part_lse)
    return out.to(q.dtype), lse


def _own_outputs(task: Task, plan: tuple[Piece, ...], parts: Parts, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each branch's output, laid out as the whole's: a backward then meets the strides that it meets everywhere."""
    own = tuple(out.new_zeros(out.shape) for _ in task.problem.pattern.segment_lengths)
    for piece, (part, _) in zip(plan, parts):
        query_view(own[piece.branch], piece).copy_(part)
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
    fold, parts = folds(q, k, v, out, lse, dout), []
    plan = pieces(task.problem, fold, task.diagonal)
    for piece in plan:
        views = query_view(q, piece), key_view(k, piece), key_view(v, piece)
        whole = query_view(kept[piece.branch] if kept else out, piece)
        gradients = partial_of(task.kernel, *views, piece.causal, task.scale)[1]
        parts.append(gradients(*views, whole, row_view(lse, piece), query_view(dout, piece)))
    if not is_fused(task, q):
        return _added(plan, parts, q, k, v)
    dq, dk, dv = (
        added(task, fold, part, x, keys) for part, x, keys in zip(zip(*parts), (q, k, v), (False, True, True))
    )
    return dq, dk, dv


def _added(
    plan: tuple[Piece, ...], parts: Parts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    totals = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
    for piece, part in zip(plan, parts):
        for total, gradient, view in zip(totals, part, (query_view, key_view, key_view)):
            view(total, piece).add_(gradient)
    dq, dk, dv = (total.to(q.dtype) for total in totals)
    return dq, dk, dv
