"""A mask made of one `blocks` part and parts that leave each row one run of keys, seen block by block.

That is all that a block-sparse kernel needs: which blocks to visit, which of them need no masking inside, and for the
others the first and last key of each row. No T x S array is made.
"""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from attnbench.masks.base import Mask, MaskShape
from attnbench.masks.gridded import Blocks
from attnbench.masks.positional import Full


class BlockLayout(NamedTuple):
    """Batch and head axes are 1 where they do not matter."""

    block_size: int
    kept: Bool[np.ndarray, "b h q kv"]
    """Blocks to visit: kept, and not wholly hidden by the other parts."""
    whole: Bool[np.ndarray, "b h q kv"]
    """Kept blocks in which every row sees every key; never the last one when keys end inside it."""
    seen: Bool[np.ndarray, "b 1 q kv"]
    """Blocks that the other parts let be seen: what sparsity is counted against."""
    low: Int[np.ndarray, "b t"]
    high: Int[np.ndarray, "b t"]
    """First and one-past-last key of each query row by the other parts; equal where a row sees none."""

    @property
    def sparsity(self) -> float:
        """Share of the blocks that could be seen but are dropped: the achieved value."""
        possible = self.seen.sum() * self.kept.shape[1] * (len(self.kept) // len(self.seen))
        return 1 - float(self.kept.sum() / possible) if possible else 0.0


def split_blocks(mask: Mask) -> tuple[Blocks, Mask] | None:
    """The one `blocks` part and the rest of the mask; None when there is none, or more than one."""
    parts = mask.split()
    found = [part for part in parts if isinstance(part, Blocks)]
    rest: Mask = reduce(and_, [part for part in parts if not isinstance(part, Blocks)], Full())
    return (found[0], rest) if len(found) == 1 else None


def block_layout(mask: Mask, shape: MaskShape, block_size: int | None = None) -> BlockLayout | None:
    """The layout in the mask's blocks, or in smaller ones that divide them; None when the mask is not of this form.

    A block in which rows see separate runs of keys with a gap between them counts as seen.
    """
    split = split_blocks(mask)
    interval = None if split is None or split[1].weighted else split[1].interval(shape)
    if split is None or interval is None:
        return None
    size = block_size or split[0].block_size
    ratio, rest = divmod(split[0].block_size, size)
    if rest:
        return None
    low, high = (np.clip(edge, 0, shape.kv_len).astype(np.int32) for edge in np.broadcast_arrays(*interval))
    high = np.maximum(low, high)
    seen, every = _by_block(low, high, shape, size)
    listed = split[0].block_mask.array
    listed = listed.reshape((1,) * (4 - listed.ndim) + listed.shape).repeat(ratio, axis=2).repeat(ratio, axis=3)
    kept = listed[:, :, : seen.shape[2], : seen.shape[3]] & seen
    return BlockLayout(size, kept, kept & every, seen, low, high)


def _by_block(low: np.ndarray, high: np.ndarray, shape: MaskShape, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[b, 1, q blocks, kv blocks]: some row of the block sees a key of it; every row sees all of them."""
    empty = low == high
    reach = np.where(empty, shape.kv_len, low), np.where(empty, 0, high)
    edges = np.arange(0, shape.q_len, size)
    first, last = (
        fold.reduceat(edge, edges, axis=1)[:, None, :, None] for fold, edge in zip((np.minimum, np.maximum), reach)
    )
    latest, earliest = (
        fold.reduceat(edge, edges, axis=1)[:, None, :, None]
        for fold, edge in zip((np.maximum, np.minimum), (low, high))
    )
    start = np.arange(0, shape.kv_len, size)
    return (first < start + size) & (last > start), (latest <= start) & (earliest >= start + size)
