"""Tables of kept blocks as tensors on a device: the blocks that each row, and each column, of blocks visits.

This module imports torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.masks import MaskShape
from attnbench.masks.cuts import BlockLayout


class BlockLists(NamedTuple):
    """Kept blocks of every row, one row after another, int32; in a row, blocks that need no masking come first."""

    begin: Tensor
    """Beginnings [rows + 1] of the rows' blocks."""
    wholes: Tensor
    """Numbers [rows] of blocks that need no masking."""
    columns: Tensor
    """Columns [kept + 1] of the blocks; the last entry is padding, so that a kernel may read one entry ahead."""


class BlockTables(NamedTuple):
    """Everything about a block-sparse mask that a kernel needs. Batch and head axes are 1 if all of them agree."""

    block_size: int
    kept: Tensor
    """Kept blocks [b or 1, h or 1, q blocks, kv blocks]."""
    whole: Tensor
    """Kept blocks that need no masking, of the same shape."""
    low: Tensor
    """First visible key [b or 1, q_len] of each row, for blocks that are not whole, int32."""
    high: Tensor
    """One past the last visible key [b or 1, q_len] of each row, int32."""
    shape: MaskShape

    @property
    def by_row(self) -> BlockLists:
        """Lists of rows (batch, head, query block), flat, over the kept axes."""
        return _lists(self.kept, self.whole)

    @property
    def by_column(self) -> BlockLists:
        """Lists of rows (batch, head, key block), flat, over the kept axes."""
        return _lists(self.kept.transpose(2, 3), self.whole.transpose(2, 3))


def tables_of(layout: BlockLayout, shape: MaskShape, device: torch.device) -> BlockTables:
    """Put a fixed layout of blocks on a device."""
    kept, whole, low, high = (
        torch.from_numpy(array.copy()).to(device) for array in (layout.kept, layout.whole, layout.low, layout.high)
    )
    return BlockTables(layout.block_size, kept, whole, low, high, shape)


def _lists(kept: Tensor, whole: Tensor) -> BlockLists:
    flat, flat_whole = (part.reshape(-1, part.shape[-1]) for part in (kept, whole))
    rows, columns = flat.nonzero(as_tuple=True)
    order = torch.argsort(rows * 2 + (~flat_whole[rows, columns]).long(), stable=True)
    begin = torch.nn.functional.pad(flat.sum(-1).cumsum(0), (1, 0))
    padded = torch.nn.functional.pad(columns[order], (0, 1))
    return BlockLists(begin.int(), flat_whole.sum(-1).int(), padded.int())
