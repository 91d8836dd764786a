"""How a task is computed on strided views of arrays of given shapes and strides: made once and used by every call.

Nothing here depends on addresses or values, so a call only takes its views, runs its dense kernels and merges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attnbench.impls.partial.torch_choice import Rules, current
from attnbench.kernels.dilated.pieces import Piece, pieces
from attnbench.kernels.dilated.task import Task
from attnbench.kernels.dilated.torch_fused import Fused, is_fused
from attnbench.kernels.dilated.torch_kernels import Sizes, partial_of
from attnbench.kernels.dilated.torch_views import View, dense_strides, fold, key_view, query_view

if TYPE_CHECKING:
    import torch

PLANS = 64
"""Plans kept; each may have small tables on its device."""
_captured: dict[int, Plan] = {}
"""Plans of captured calls, kept for good: a CUDA graph reads their tables at every replay."""


class Step(NamedTuple):
    """One dense call: views, heads first, of the arrays it reads, and its kernel's two passes on them."""

    piece: Piece
    q: View
    k: View
    v: View
    out: View
    """Of out and dout."""
    lse: View
    """[stack, heads, queries] of an LSE [b, s, h]."""
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class Plan(NamedTuple):
    """The steps, the strides that out and dout must have, and how results are merged (None: piece by piece)."""

    steps: tuple[Step, ...]
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    fused: Fused | None


def plan_of(task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Plan:
    """The plan for arrays like these."""
    strides = (q.stride(), k.stride(), v.stride())
    plan = _plan(task, q.dtype, q.device, (q.shape, k.shape, v.shape), strides, current())
    if q.is_cuda and _is_capturing():
        _captured[id(plan)] = plan
    return plan


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=PLANS)
def _plan(
    task: Task, dtype: torch.dtype, device: torch.device, shapes: Sequence[Sequence[int]], strides: Sequence[Any],
    rules: Rules,
) -> Plan:  # fmt: skip
    """Make a plan whose kernels were chosen under these rules."""
    del rules  # the kernels ask for them again: they are part of the key
    from attnbench.impls.partial.torch_autograd import turned

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
        stack, heads, kv_heads = piece.stack, piece.heads.number, piece.heads.kv_number
        sizes = Sizes(stack, piece.queries, piece.keys, heads, kv_heads, head_dim, value_dim)
        pair = turned(partial_of(task.kernel, dtype, device, sizes, piece.causal, task.scale))
        steps.append(Step(piece, *views, *pair))
    fused = Fused(task.problem, folds, task.diagonal, len(plan)) if is_fused(task, dtype, device) else None
    return Plan(tuple(steps), out_shape, out_strides, fused)
