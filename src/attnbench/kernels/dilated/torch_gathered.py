"""The plain way: copy each branch's tokens out, attend, scatter back, and mix all branches at the end.

Every branch's output lies in memory at full size in float32 until it is mixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.kernels.dilated.pieces import Piece, pieces
from attnbench.kernels.dilated.task import Task
from attnbench.kernels.dilated.torch_kernels import Sizes, partial_of
from attnbench.kernels.dilated.torch_views import folds, keys_of, nothing_merged, queries_of, rows_of
from attnbench.spec import Partial

if TYPE_CHECKING:
    import torch

    from attnbench.kernels.dilated.task import Forward


def forward(task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Forward:
    """(out, lse [b, s, h], each branch's own output where the backward will want it)."""
    import torch

    branches = [_branch(task, n, q, k, v) for n in range(len(task.problem.pattern.segment_lengths))]
    lse = torch.logsumexp(torch.stack([lse for _, lse in branches]), 0)
    seen = lse.masked_fill(lse == float("-inf"), 0.0)
    out = torch.zeros_like(branches[0][0])
    for branch_out, branch_lse in branches:
        out += torch.exp(branch_lse - seen).unsqueeze(-1) * branch_out
    kept = tuple(branch_out.to(q.dtype) for branch_out, _ in branches) if keep and task.detached else ()
    return out.to(q.dtype), lse, kept


def _branch(
    task: Task, branch: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [b, s, h, d] and LSE [b, s, h] of one branch; 0 and -inf where a head skips a token."""
    out, lse = nothing_merged(q, v)
    for piece in _plan(task, q, k, v):
        if piece.branch == branch:
            a, b, c = queries_of(q, piece).contiguous(), *(keys_of(x, piece).contiguous() for x in (k, v))
            part, part_lse = _partial(task, piece, a, c)[0](a, b, c)
            queries_of(out, piece).copy_(part)
            rows_of(lse, piece).copy_(part_lse)
    return out, lse


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
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for piece in _plan(task, q, k, v, out, lse, dout):
        rows = (q, kept[piece.branch] if kept else out, dout)
        a, whole, cotangent = (queries_of(x, piece).contiguous() for x in rows)
        b, c = (keys_of(x, piece).contiguous() for x in (k, v))
        parts = _partial(task, piece, a, c)[1](a, b, c, whole, rows_of(lse, piece).contiguous(), cotangent)
        for total, part, view in zip((dq, dk, dv), parts, (queries_of, keys_of, keys_of)):
            view(total, piece).add_(part)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _plan(task: Task, *arrays: torch.Tensor) -> tuple[Piece, ...]:
    return pieces(task.problem, folds(*arrays), diagonal=False)


def _partial(task: Task, piece: Piece, q: torch.Tensor, v: torch.Tensor) -> Partial:
    heads = piece.heads
    sizes = Sizes(piece.stack, piece.queries, piece.keys, heads.number, heads.kv_number, q.shape[-1], v.shape[-1])
    return partial_of(task.kernel, q.dtype, q.device, sizes, piece.causal, task.scale)
