"""Merging and adding up in one pass: the launches of the Triton kernels.

Not where keys have lengths of their own (segments are then cut differently in each batch row), nor in float64.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from attnbench.errors import UsageError
from attnbench.impls.conditions import find_module
from attnbench.kernels.dilated.pieces import Problem
from attnbench.kernels.dilated.strands import strands
from attnbench.kernels.dilated.task import Task
from attnbench.kernels.dilated.torch_tables import Tables

if TYPE_CHECKING:
    import torch

BLOCK = 64


def is_fused(task: Task, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this task's results are merged by Triton; an explicit "triton" that cannot be had is an error."""
    if task.merge not in ("auto", "triton", "eager"):
        raise UsageError(f'merge is "auto", "triton" or "eager", not "{task.merge}".')
    reason = None if task.merge == "eager" else _why_not(task, dtype, device)
    if task.merge == "triton" and reason is not None:
        raise UsageError(f'merge="triton" {reason}; "eager" does.')
    return task.merge != "eager" and reason is None


def _why_not(task: Task, dtype: torch.dtype, device: torch.device) -> str | None:
    if task.problem.lengths is not None:
        return "takes no key lengths"
    if str(dtype) == "torch.float64":
        return "does not merge float64"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU, not {device.type}"
    return None if _has_triton() else "needs the package triton"


@cache
def _has_triton() -> bool:
    return find_module("triton") is not None


class Fused:
    """The launches of one plan. Parts come as the dense kernels make them: heads first, each an array of its own."""

    def __init__(self, problem: Problem, fold: bool, diagonal: bool, pieces: int) -> None:
        queries, keys = (strands(problem, fold, diagonal, keys) for keys in (False, True))
        self._merging = Tables([queries], pieces, has_lse=True)
        self._adding = Tables([queries, keys, keys], pieces)
        pattern = problem.pattern
        branches = {"WIDTHS": pattern.segment_lengths, "RATES": pattern.dilation_rates}
        branches |= {"BRANCHES": len(pattern.dilation_rates), "BLOCK": BLOCK}
        self._sizes = [branches | {"RESTS": found.ragged} for found in (queries, keys, keys)]
        self._strands = [found.piece.shape[3] for found in (queries, keys, keys)]

    def merged(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: Sequence[int], keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out of that shape [b, s, h, d], lse [b, s, h]) of the pieces' (out, lse).

        With `keep` the pieces' LSEs are overwritten by the whole's.
        """
        import torch

        from attnbench.kernels.dilated.triton_kernels import merge_kernel

        first = parts[0][0]
        out = torch.empty(shape, dtype=first.dtype, device=first.device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=first.device)
        arrays = [part for part, _ in parts]
        arrays += [part for _, part in parts]
        with _current(out.device):
            (table,), align = self._merging.placed(arrays, (out, lse))
            self._launch(merge_kernel, 0, align, table, out, lse, KEEP=keep)
        return out, lse

    def added(
        self, parts: Sequence[tuple[torch.Tensor, ...]], *likes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv), shaped as q, k and v: the sums of the pieces' own."""
        import torch

        from attnbench.kernels.dilated.triton_kernels import add_kernel

        dq, dk, dv = wholes = tuple([torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in likes])
        arrays = [part for three in zip(*parts) for part in three]
        with _current(dq.device):
            tables, align = self._adding.placed(arrays, wholes)
            if dq.shape == dk.shape == dv.shape:
                self._launch(add_kernel, 0, align, tables[0], *wholes, depth=3, STRANDS=1)
                return dq, dk, dv
            for index, (table, whole) in enumerate(zip(tables, wholes)):
                self._launch(add_kernel, index, align, table, whole, whole, whole, STRANDS=self._strands[index])
        return dq, dk, dv

    def _launch(
        self,
        kernel: Any,
        index: int,
        align: int,
        table: torch.Tensor,
        out: torch.Tensor,
        *rest: torch.Tensor,
        depth: int = 1,
        **more: Any,
    ) -> None:
        batch, tokens, heads, dim = out.shape
        kernel[-(-tokens // BLOCK), batch * heads, depth](
            table, out, *rest, tokens, heads, DIM=dim, BLOCK_DIM=max(16, 1 << (dim - 1).bit_length()), ALIGN=align,
            **self._sizes[index], **more,
        )  # fmt: skip


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which is rarely another one."""
    import torch

    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
