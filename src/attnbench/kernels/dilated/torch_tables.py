"""Tables for the fused kernels (see triton_kernels): where the rows of partial results lie.

What depends on strides is made on the host once and stays on the device. Where this call's arrays lie a kernel adds
there: nothing waits, nothing is copied from the host, and a CUDA graph replays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnbench.errors import UsageError
from attnbench.kernels.dilated.strands import Strands
from attnbench.kernels.dilated.torch_views import readable

if TYPE_CHECKING:
    import torch

POINTERS = 64
"""Most arrays that one launch is told of."""
BLOCK = 128


class _Source(NamedTuple):
    """A table that counts from each array's own beginning."""

    table: torch.Tensor
    align: int
    """Numbers that every row is a multiple of, if all arrays begin at one of 16 bytes."""
    copied: tuple[int, ...]
    """Arrays whose rows no kernel could read where they lie."""


class Tables:
    """For one or more wholes, each made of as many pieces; with `has_lse` there is one, and its LSE beside it."""

    def __init__(self, found: Sequence[Strands], pieces: int, has_lse: bool = False) -> None:
        self._found, self._pieces, self._has_lse = tuple(found), pieces, has_lse
        # As good as always one: the kernels of one plan give their results the same strides again and again.
        self._sources: dict[tuple[Any, ...], _Source] = {}
        ends = np.cumsum([one.piece.size for one in found]).tolist()
        self._spans = tuple(zip([0, *ends[:-1]], (one.piece.size for one in found)))
        self._entries = ends[-1]

    def placed(self, arrays: list[torch.Tensor], wholes: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], int]:
        """(a table for each whole, numbers that every row is a multiple of); `arrays`: all pieces of each in turn."""
        import torch

        from attnbench.kernels.dilated import triton_kernels

        place_kernel: Any = triton_kernels.place_kernel
        source = self._source(arrays, wholes)
        for index in source.copied:
            arrays[index] = arrays[index].contiguous()
        table = torch.empty((self._entries, 8), dtype=torch.int64, device=wholes[0].device)
        grid, read = (-(-self._entries // BLOCK),), source.table
        for first in range(0, len(arrays), POINTERS):
            some = tuple(arrays[first : first + POINTERS])
            place_kernel[grid](
                read, table, self._entries, some, tuple(wholes), FIRST=first, PIECES=self._pieces,
                HAS_LSE=self._has_lse, BLOCK=BLOCK,
            )  # fmt: skip
            read = table
        tables = [table] if len(self._spans) == 1 else [table.narrow(0, begin, size) for begin, size in self._spans]
        return tables, source.align if _aligned(self._rows(arrays)) and _aligned(wholes) else 1

    def _rows(self, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        return arrays[: self._pieces] if self._has_lse else arrays

    def _source(self, arrays: list[torch.Tensor], wholes: Sequence[torch.Tensor]) -> _Source:
        key = tuple([x.stride() for x in arrays])
        found = self._sources.get(key)
        if found is None:
            found = self._sources[key] = self._made(arrays, wholes)
        return found

    def _made(self, arrays: list[torch.Tensor], wholes: Sequence[torch.Tensor]) -> _Source:
        import torch

        if wholes[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "call dilated attention on arrays of this shape once before capturing it in a CUDA graph: its tables "
                "are made then."
            )
        rows = [readable(x) for x in self._rows(arrays)]
        pieces, parts = self._pieces, []
        for index, found in enumerate(self._found):
            strides = [x.stride() for x in rows[index * pieces : (index + 1) * pieces]]
            of_lse = [x.stride() for x in arrays[pieces:]] if self._has_lse else None
            parts.append(_entries(found, strides, of_lse, index * pieces))
        values = np.concatenate(parts)
        align = 16 // wholes[0].element_size()
        dims = {x.shape[-1] for x in rows}
        if any(dim % align for dim in dims) or (values[:, :3] % align).any():
            align = 1
        copied = tuple(n for n, (x, y) in enumerate(zip(rows, arrays)) if x is not y)
        return _Source(torch.from_numpy(values).to(wholes[0].device), align, copied)


def _aligned(arrays: Sequence[torch.Tensor]) -> bool:
    bits = 0
    for x in arrays:
        bits |= x.data_ptr()
    return bits % 16 == 0


def _entries(found: Strands, rows: list[Any], numbers: list[Any] | None, first: int) -> np.ndarray:
    """[entries, 8]; pieces are numbered from `first` on."""
    columns = [*_places(found, rows), *(_places(found, numbers) if numbers else (found.offset * 0,) * 3)]
    exists = found.piece >= 0
    values = np.where(exists[..., None], np.stack([*columns, found.offset, found.piece + first + 1], -1), 0)
    values[..., 6] = found.offset
    return np.ascontiguousarray(values.reshape(-1, 8), np.int64)


def _places(found: Strands, strides: list[Any]) -> tuple[np.ndarray, ...]:
    """First row's distance from its array's beginning, and those between stacked segments and rows, in numbers."""
    stack, head, row = (np.array([one[axis] for one in strides], np.int64)[found.piece] for axis in range(3))
    return found.stacked * stack + found.head * head, stack, row
