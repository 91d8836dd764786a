"""Merging and adding up in one pass: tables for the Triton kernels, and their launches.

Not where keys have lengths of their own (segments are then cut differently in each batch row), nor in float64.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from attnbench.errors import UsageError
from attnbench.impls.conditions import find_module
from attnbench.impls.dilated.strands import Strands, strands
from attnbench.impls.dilated.task import Task
from attnbench.impls.dilated.torch_views import readable

if TYPE_CHECKING:
    import torch

BLOCK = 64
TABLES = 64
"""Tables kept on devices: calls in a loop meet the same addresses again."""
STAGED = 1 << 20
"""Numbers of pinned memory for the tables of captured calls."""
_tables: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()


def is_fused(task: Task, x: torch.Tensor) -> bool:
    """Whether this task's results are merged by Triton; an explicit "triton" that cannot be had is an error."""
    if task.merge not in ("auto", "triton", "eager"):
        raise UsageError(f'merge is "auto", "triton" or "eager", not "{task.merge}".')
    reason = None if task.merge == "eager" else _why_not(task, x)
    if task.merge == "triton" and reason is not None:
        raise UsageError(f'merge="triton" {reason}; "eager" does.')
    return task.merge != "eager" and reason is None


def _why_not(task: Task, x: torch.Tensor) -> str | None:
    if task.problem.lengths is not None:
        return "takes no key lengths"
    if str(x.dtype) == "torch.float64":
        return "does not merge float64"
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU, not {x.device.type}"
    return None if _has_triton() else "needs the package triton"


@cache
def _has_triton() -> bool:
    return find_module("triton") is not None


def merged(
    task: Task, fold: bool, parts: Sequence[tuple[torch.Tensor, ...]], q: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, s, h, d], lse [b, s, h]) of the pieces' (out, lse)."""
    import torch

    from attnbench.impls.dilated.triton_kernels import merge_kernel

    out = torch.empty((*q.shape[:3], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    found = strands(task.problem, fold, task.diagonal, keys=False)
    rows, numbers = [readable(part) for part, _ in parts], [part.transpose(1, 2) for _, part in parts]
    table, align = _table(found, rows, out, numbers, lse)
    _launch(merge_kernel, task, found, out, align, table, out, lse)
    return out, lse


def added(task: Task, fold: bool, parts: Sequence[torch.Tensor], like: torch.Tensor, keys: bool) -> torch.Tensor:
    """The sum [b, s, h, d] of the pieces' gradients of q, or of k or v (`keys`)."""
    import torch

    from attnbench.impls.dilated.triton_kernels import add_kernel

    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    found = strands(task.problem, fold, task.diagonal, keys)
    rows = [readable(part) for part in parts]
    table, align = _table(found, rows, out)
    _launch(add_kernel, task, found, out, align, table, out, STRANDS=found.piece.shape[3])
    return out


def _launch(
    kernel: Any, task: Task, found: Strands, out: torch.Tensor, align: int, *arrays: torch.Tensor, **sizes: int
) -> None:
    import torch

    batch, tokens, heads, dim = out.shape
    pattern = task.problem.pattern
    grid = (-(-tokens // BLOCK), batch * heads)
    with torch.cuda.device(out.device if out.is_cuda else -1):
        kernel[grid](
            *arrays, tokens, heads, WIDTHS=pattern.segment_lengths, RATES=pattern.dilation_rates, RESTS=found.ragged,
            BRANCHES=len(pattern.dilation_rates), DIM=dim, BLOCK_DIM=max(16, 1 << (dim - 1).bit_length()), ALIGN=align,
            BLOCK=BLOCK, **sizes,
        )  # fmt: skip


def _table(
    found: Strands,
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    numbers: Sequence[torch.Tensor] = (),
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """(the table on the device, numbers that every row is a multiple of)."""
    groups = [(parts, out)] + ([] if lse is None else [(numbers, lse)])
    places = [_places(found, arrays, whole) for arrays, whole in groups]
    places += [(found.offset * 0,) * 3] * (2 - len(places))
    columns = [*places[0], *places[1], found.offset, found.piece >= 0]
    values = np.where((found.piece >= 0)[..., None], np.stack(columns, -1), 0)
    values[..., 6] = found.offset
    align = 16 // out.element_size()
    if out.shape[-1] % align or any((column % align).any() for column in places[0]):
        align = 1
    return _on_device(values, out), align


def _places(found: Strands, arrays: Sequence[torch.Tensor], whole: torch.Tensor) -> tuple[np.ndarray, ...]:
    """First row's distance from `whole`, and the strides between stacked segments and rows, in numbers."""
    size = whole.element_size()
    begin = np.array([x.data_ptr() - whole.data_ptr() for x in arrays], np.int64)[found.piece] // size
    stack, row, head = (np.array([x.stride(axis) for x in arrays], np.int64)[found.piece] for axis in range(3))
    return begin + found.stacked * stack + found.head * head, stack, row


def _on_device(values: np.ndarray, out: torch.Tensor) -> torch.Tensor:
    """The table where the kernel reads it."""
    import torch

    host = torch.from_numpy(np.ascontiguousarray(values, np.int64))
    if not out.is_cuda:
        return host
    if torch.cuda.is_current_stream_capturing():
        return _staging().take(host).to(out.device, non_blocking=True)
    _staging()
    key = (out.device, torch.cuda.current_stream(out.device).cuda_stream, values.shape, values.tobytes())
    if key not in _tables:
        _tables[key] = host.pin_memory().to(out.device, non_blocking=True)
        while len(_tables) > TABLES:
            _tables.popitem(last=False)
    return _tables[key]


class _Staging:
    """Pinned memory that is never given back: a CUDA graph copies its tables from here at every replay."""

    def __init__(self) -> None:
        import torch

        self._numbers, self._used = torch.empty(STAGED, dtype=torch.int64, pin_memory=True), 0

    def take(self, host: torch.Tensor) -> torch.Tensor:
        """A lasting copy."""
        begin, self._used = self._used, self._used + host.numel()
        if self._used > STAGED:
            raise UsageError(f"CUDA graphs hold {STAGED * 8 >> 20} MiB of tables of dilated attention: capture fewer.")
        return self._numbers[begin : self._used].view(host.shape).copy_(host)


@cache
def _staging() -> _Staging:
    """Made at a first call outside any capture, since a capturing stream may not allocate pinned memory."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise UsageError("call dilated attention once before capturing it in a CUDA graph.")
    return _Staging()
