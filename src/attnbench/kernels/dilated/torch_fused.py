"""Merging and adding up partial results in one pass: tables of where their rows lie, and launches of Triton kernels.

The part of a table that depends on strides is made on the host once and stays on the device; for each call a kernel
adds the addresses of its arrays. So no call waits for the host or copies from it, and a CUDA graph can replay it. Key
lengths (which cut segments differently in each batch row) and float64 are not fused. This module imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnbench.errors import UsageError
from attnbench.impls.conditions import find_module
from attnbench.kernels.dilated.pieces import DilatedPiece, DilatedProblem, Task, pieces, readable


class Strands(NamedTuple):
    """Place of each head's rows among the pieces, in arrays [batch, heads, branches, strands, 2].

    A strand is one offset of a branch; the last axis is for whole segments and for the shorter segment at the end.
    """

    piece: np.ndarray
    """Number of the piece, or -1."""
    stacked: np.ndarray
    """Place in the piece's stack of the batch row's first segment."""
    head: np.ndarray
    """Place among the piece's heads."""
    offset: np.ndarray

    @property
    def ragged(self) -> tuple[bool, ...]:
        """Whether some segment is shorter than the width, for each branch."""
        return tuple(bool((self.piece[:, :, n, :, 1] >= 0).any()) for n in range(self.piece.shape[2]))


@lru_cache(maxsize=256)
def strands(problem: DilatedProblem, fold: bool, diagonal: bool, keys: bool) -> Strands:
    """Make the strands of the query heads, or of the key/value heads, whose query heads may differ in offset."""
    branches, heads = len(problem.pattern.segment_lengths), problem.kv_heads if keys else problem.heads
    widest = problem.heads // problem.kv_heads if keys else 1
    places = Strands(*(np.full((problem.batch, heads, branches, widest, 2), -1, np.int64) for _ in range(4)))
    for number, piece in enumerate(pieces(problem, fold, diagonal)):
        whole = problem.tokens // problem.pattern.segment_lengths[piece.branch]
        kind = 0 if piece.start == 0 and whole else 1
        for nth, head, offset in _members(piece, keys):
            known = places.offset[0, head, piece.branch, :, 0].tolist()
            slot = known.index(offset if offset in known else -1)  # the strand of this offset, or the first free one
            for row, first in _rows(piece, problem.tokens):
                at = (row, head, piece.branch, slot, kind)
                places.piece[at], places.stacked[at], places.head[at] = number, first, nth
            places.offset[:, head, piece.branch, slot] = offset
    return places


def _members(piece: DilatedPiece, keys: bool) -> list[tuple[int, int, int]]:
    """List (place in the piece, head, offset) of each of its heads."""
    heads, (first, step, number) = piece.heads, piece.heads.line(keys)
    return [(n, first + n * step, heads.offset + n * heads.shift) for n in range(number)]


def _rows(piece: DilatedPiece, tokens: int) -> list[tuple[int, int]]:
    """List (batch row, place in the stack of its first segment)."""
    rows = piece.row + (piece.start + np.arange(piece.stack) * piece.apart) // tokens
    return [(int(row), int(first)) for row, first in zip(*np.unique(rows, return_index=True))]


POINTERS = 64
"""Most arrays that one launch takes."""
TOKENS, ENTRIES = 64, 128
"""Tokens of a result, and entries of a table, that one program writes."""


class _Source(NamedTuple):
    """A table whose first rows are counted from each array's own beginning."""

    table: Tensor
    align: int
    """Number that every row is a multiple of, if all arrays begin at a multiple of 16 bytes."""
    copied: tuple[int, ...]
    """Arrays that must be copied, since no kernel could read their rows where they lie."""


class Tables:
    """Tables for one or more wholes of equally many pieces; with `has_lse`, for one whole and its LSE."""

    def __init__(self, strands: Sequence[Strands], pieces: int, has_lse: bool = False) -> None:
        self._strands, self._pieces, self._has_lse = tuple(strands), pieces, has_lse
        # Nearly always one: the kernels of one plan give their results the same strides in every call.
        self._sources: dict[tuple[Any, ...], _Source] = {}
        sizes = [of_whole.piece.size for of_whole in strands]
        ends = np.cumsum(sizes).tolist()
        self._spans = tuple(zip([0, *ends[:-1]], sizes))
        self._entries = ends[-1]

    def placed(self, arrays: list[Tensor], wholes: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        """Return (a table for each whole, the number that every row is a multiple of).

        `arrays` are all pieces of the first whole, then of the next; those that no kernel could read are copied.
        """
        from attnbench.kernels.dilated import triton_kernels

        place_kernel: Any = triton_kernels.place_kernel
        strides = tuple([x.stride() for x in arrays])
        if (source := self._sources.get(strides)) is None:
            source = self._sources[strides] = self._made(arrays, wholes)
        for index in source.copied:
            arrays[index] = arrays[index].contiguous()
        table = torch.empty((self._entries, 8), dtype=torch.int64, device=wholes[0].device)
        grid, read = (-(-self._entries // ENTRIES),), source.table
        for first in range(0, len(arrays), POINTERS):
            parts = tuple(arrays[first : first + POINTERS])
            place_kernel[grid](
                read, table, self._entries, parts, tuple(wholes), FIRST=first, PIECES=self._pieces,
                HAS_LSE=self._has_lse, BLOCK=ENTRIES,
            )  # fmt: skip
            read = table
        tables = [table] if len(self._spans) == 1 else [table.narrow(0, begin, size) for begin, size in self._spans]
        aligned = all(x.data_ptr() % 16 == 0 for x in (*self._rows(arrays), *wholes))
        return tables, source.align if aligned else 1

    def _rows(self, arrays: list[Tensor]) -> list[Tensor]:
        return arrays[: self._pieces] if self._has_lse else arrays

    def _made(self, arrays: list[Tensor], wholes: Sequence[Tensor]) -> _Source:
        if wholes[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "dilated attention makes its tables at the first call on arrays of a shape, which a CUDA graph cannot "
                "capture: call it on arrays of this shape once before capturing."
            )
        rows = [readable(x) for x in self._rows(arrays)]
        pieces, parts = self._pieces, []
        for index, of_whole in enumerate(self._strands):
            strides = [x.stride() for x in rows[index * pieces : (index + 1) * pieces]]
            of_lse = [x.stride() for x in arrays[pieces:]] if self._has_lse else None
            parts.append(_entries(of_whole, strides, of_lse, index * pieces))
        values = np.concatenate(parts)
        align = 16 // wholes[0].element_size()
        dims = {x.shape[-1] for x in rows}
        if any(dim % align for dim in dims) or (values[:, :3] % align).any():
            align = 1
        copied = tuple(n for n, (x, y) in enumerate(zip(rows, arrays)) if x is not y)
        return _Source(torch.from_numpy(values).to(wholes[0].device), align, copied)


def _entries(strands: Strands, rows: list[Any], numbers: list[Any] | None, first: int) -> np.ndarray:
    """Make the table [entries, 8]; pieces are numbered from `first` on."""
    columns = [*_places(strands, rows), *(_places(strands, numbers) if numbers else (strands.offset * 0,) * 3)]
    exists = strands.piece >= 0
    values = np.where(exists[..., None], np.stack([*columns, strands.offset, strands.piece + first + 1], -1), 0)
    values[..., 6] = strands.offset
    return np.ascontiguousarray(values.reshape(-1, 8), np.int64)


def _places(strands: Strands, strides: list[Any]) -> tuple[np.ndarray, ...]:
    """Return the distances of the first row from its array's beginning, between stacked segments and between rows."""
    stack, head, row = (
        np.array([of_piece[axis] for of_piece in strides], np.int64)[strands.piece] for axis in range(3)
    )
    return strands.stacked * stack + strands.head * head, stack, row


def is_fused(task: Task, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether Triton merges this task's results; raise UsageError if merge="triton" is impossible."""
    if task.merge not in ("auto", "triton", "eager"):
        raise UsageError(f'merge must be "auto", "triton" or "eager", not "{task.merge}".')
    if task.merge == "eager":
        return False
    reason = None
    if task.problem.lengths is not None:
        reason = "takes no key lengths"
    elif dtype == torch.float64:
        reason = "does not merge float64"
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = f"needs a GPU, not {device.type}"
    elif find_module("triton") is None:
        reason = "needs the package triton"
    if task.merge == "triton" and reason is not None:
        raise UsageError(f'merge="triton" {reason}: use merge="eager" or "auto".')
    return reason is None


class Fused:
    """Launches of one plan. Parts are as the dense kernels return them: heads first, each an array of its own."""

    def __init__(self, problem: DilatedProblem, fold: bool, diagonal: bool, pieces: int) -> None:
        queries, keys = (strands(problem, fold, diagonal, keys) for keys in (False, True))
        self._merging = Tables([queries], pieces, has_lse=True)
        self._adding = Tables([queries, keys, keys], pieces)
        pattern = problem.pattern
        branches = {"WIDTHS": pattern.segment_lengths, "RATES": pattern.dilation_rates}
        branches |= {"BRANCHES": len(pattern.dilation_rates), "BLOCK": TOKENS}
        self._sizes = [branches | {"RESTS": of_whole.ragged} for of_whole in (queries, keys, keys)]
        self._strands = [of_whole.piece.shape[3] for of_whole in (queries, keys, keys)]

    def merged(self, parts: Sequence[tuple[Tensor, Tensor]], shape: Sequence[int], keep: bool) -> tuple[Tensor, Tensor]:
        """Merge the pieces' (out, lse) into (out of that shape [b, s, h, d], lse [b, s, h]).

        With `keep` the whole's LSE overwrites the pieces' LSEs.
        """
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

    def added(self, parts: Sequence[tuple[Tensor, ...]], *likes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the pieces' gradients into (dq, dk, dv), shaped as q, k and v."""
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
        table: Tensor,
        out: Tensor,
        *rest: Tensor,
        depth: int = 1,
        **more: Any,
    ) -> None:
        batch, tokens, heads, dim = out.shape
        kernel[-(-tokens // TOKENS), batch * heads, depth](
            table, out, *rest, tokens, heads, DIM=dim, BLOCK_DIM=max(16, 1 << (dim - 1).bit_length()), ALIGN=align,
            **self._sizes[index], **more,
        )  # fmt: skip


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches; usually it is already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
