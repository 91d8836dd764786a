"""Which blocks each row (and each column) of blocks visits, as tensors on a device: what kernels walk along."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attnbench.masks import MaskShape
from attnbench.masks.cuts import BlockLayout

if TYPE_CHECKING:
    import torch


class BlockLists(NamedTuple):
    """Kept blocks of every row, one row after another, int32; in a row those that need no masking come first."""

    begin: torch.Tensor
    """[rows + 1] where a row's blocks begin."""
    wholes: torch.Tensor
    """[rows] how many of them need no masking."""
    columns: torch.Tensor
    """[kept + 1] their columns; the last entry is padding, so that a kernel may read one ahead."""


class BlockTables(NamedTuple):
    """Everything about a block-sparse mask that a kernel needs. Batch and head axes are 1 where all are alike."""

    block_size: int
    kept: torch.Tensor
    """[b or 1, h or 1, q blocks, kv blocks]"""
    whole: torch.Tensor
    low: torch.Tensor
    """[b or 1, q_len] first visible key of a row where a block is not whole, int32."""
    high: torch.Tensor
    """[b or 1, q_len] one past the last."""
    shape: MaskShape

    @property
    def by_row(self) -> BlockLists:
        """Rows are (batch, head, query block), flat, over the kept axes."""
        return _lists(self.kept, self.whole)

    @property
    def by_column(self) -> BlockLists:
        """Rows are (batch, head, key block), flat, over the kept axes."""
        return _lists(self.kept.transpose(2, 3), self.whole.transpose(2, 3))


def tables_of(layout: BlockLayout, shape: MaskShape, device: torch.device) -> BlockTables:
    """A fixed layout on a device."""
    import torch

    kept, whole, low, high = (
        torch.from_numpy(array.copy()).to(device) for array in (layout.kept, layout.whole, layout.low, layout.high)
    )
    return BlockTables(layout.block_size, kept, whole, low, high, shape)


def _lists(kept: torch.Tensor, whole: torch.Tensor) -> BlockLists:
    import torch

    flat, flat_whole = (part.reshape(-1, part.shape[-1]) for part in (kept, whole))
    rows, columns = flat.nonzero(as_tuple=True)
    order = torch.argsort(rows * 2 + (~flat_whole[rows, columns]).long(), stable=True)
    begin = torch.nn.functional.pad(flat.sum(-1).cumsum(0), (1, 0))
    padded = torch.nn.functional.pad(columns[order], (0, 1))
    return BlockLists(begin.int(), flat_whole.sum(-1).int(), padded.int())
