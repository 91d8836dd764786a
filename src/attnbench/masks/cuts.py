"""Masks cut into blocks for block-sparse kernels, or into pieces that a dense kernel takes without a mask array.

Neither needs an array of q_len x kv_len values.
"""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

from attnbench.masks.arrays import Blocks, Lengths
from attnbench.masks.base import Mask, MaskShape, freeze
from attnbench.masks.combine import both
from attnbench.masks.positional import Causal, Full

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

_Kind = TypeVar("_Kind", bound=Mask)


class BlockLayout(NamedTuple):
    """A mask of one `blocks` part and parts that leave each row one run of keys, as a block-sparse kernel needs it.

    Batch and head axes have size 1 if the mask ignores them.
    """

    block_size: int
    kept: Bool[np.ndarray, "b h q kv"]
    """Blocks to visit: kept, and not fully hidden by the other parts."""
    whole: Bool[np.ndarray, "b h q kv"]
    """Kept blocks in which every row sees every key; never a last block in which the keys end."""
    seen: Bool[np.ndarray, "b 1 q kv"]
    """Blocks in which the other parts leave a pair visible: the base of `sparsity`."""
    low: Int[np.ndarray, "b t"]
    high: Int[np.ndarray, "b t"]
    """First and end of the keys that the other parts let each query row see; equal if a row sees none."""

    @property
    def sparsity(self) -> float:
        """Share of the visible blocks that are dropped."""
        possible = self.seen.sum() * self.kept.shape[1] * (len(self.kept) // len(self.seen))
        return 1 - float(self.kept.sum() / possible) if possible else 0.0


def split_blocks(mask: Mask) -> tuple[Blocks, Mask] | None:
    """Return the only `blocks` part and the rest of the mask; None if there is none, or more than one."""
    blocks, rest = _split_off(mask, Blocks)
    return (blocks[0], rest) if len(blocks) == 1 else None


def _split_off(mask: Mask, kind: type[_Kind]) -> tuple[list[_Kind], Mask]:
    """Return the parts of a kind, and the mask of all others."""
    others = [part for part in mask.split() if not isinstance(part, kind)]
    return [part for part in mask.split() if isinstance(part, kind)], reduce(and_, others, Full())


def block_layout(mask: Mask, shape: MaskShape, block_size: int | None = None) -> BlockLayout | None:
    """Return the layout in the mask's blocks, or in smaller ones that divide them; None if the mask has another form.

    A block in which rows see separate runs of keys with a gap between them counts as seen.
    """
    if (split := split_blocks(mask)) is None:
        return None
    blocks, others = split
    runs = None if others.weighted else others.runs(shape)
    size = block_size or blocks.block_size
    ratio, rest = divmod(blocks.block_size, size)
    if runs is None or rest:
        return None
    low, high = (edge.astype(np.int32) for edge in runs)
    empty = low == high
    starts, key_starts = np.arange(0, shape.q_len, size), np.arange(0, shape.kv_len, size)
    first, last, latest, earliest = (
        fold.reduceat(edge, starts, axis=1)[:, None, :, None]
        for fold, edge in (
            (np.minimum, np.where(empty, shape.kv_len, low)),
            (np.maximum, np.where(empty, 0, high)),
            (np.maximum, low),
            (np.minimum, high),
        )
    )
    seen = (first < key_starts + size) & (last > key_starts)
    whole = (latest <= key_starts) & (earliest >= key_starts + size)
    listed = blocks.block_mask.array
    listed = listed.reshape((1,) * (4 - listed.ndim) + listed.shape).repeat(ratio, axis=2).repeat(ratio, axis=3)
    kept = listed[:, :, : seen.shape[2], : seen.shape[3]] & seen
    return BlockLayout(size, kept, kept & whole, seen, low, high)


Shape = Literal["full", "causal"]


class MaskPiece(NamedTuple):
    """Queries start:stop over keys first:last under `mask`, whose queries and keys are those of the piece."""

    start: int
    stop: int
    first: int
    last: int
    mask: Mask


def pieces(mask: Mask, shape: MaskShape, most: int) -> list[MaskPiece] | str:
    """Return at most `most` pieces in the order of the queries, or the reason why there are none.

    Key lengths stay a part of each piece.
    """
    lengths, rest = _split_off(mask, Lengths)
    runs = None if rest.weighted else rest.runs(shape)
    if runs is None:
        return f"needs a mask in which every query sees one run of keys, not {rest.id}"
    if any((edge != edge[:1]).any() for edge in runs):
        return "needs batch rows with the same mask, apart from key lengths"
    low, high = (edge[0] for edge in runs)
    if (low == high).any():
        return "takes no mask with rows that see no key"
    cut = _runs(low, high, most, growing=False) or _runs(low, high, most, growing=True)
    if cut is None:
        return f"takes masks of at most {most} blocks of queries that see the same keys, or one key more each"
    return [
        MaskPiece(start, stop, int(low[start]), int(high[stop - 1]), _within(kind, low[start], high[stop - 1], lengths))
        for start, stop, kind in cut
    ]


def _runs(low: np.ndarray, high: np.ndarray, most: int, growing: bool) -> list[tuple[int, int, Shape]] | None:
    """Return runs of rows that see the same keys; if `growing`, also of rows that see one key more each."""
    steps: dict[Shape, int] = {"full": 0, "causal": 1} if growing else {"full": 0}
    ends = {
        kind: np.append(np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != step)) + 1, len(low))
        for kind, step in steps.items()
    }
    runs: list[tuple[int, int, Shape]] = []
    start = 0
    while start < len(low):
        if len(runs) == most:
            return None
        stops = {kind: int(after[np.searchsorted(after, start, side="right")]) for kind, after in ends.items()}
        kind = max(steps, key=lambda one: stops[one])
        runs.append((start, stops[kind], kind))
        start = stops[kind]
    return runs


def _within(kind: Shape, first: int, last: int, lengths: list[Lengths]) -> Mask:
    """Return the mask inside a piece: causal or full, and the key lengths that end inside the piece."""
    mask: Mask = Causal() if kind == "causal" else Full()
    for part in lengths:
        inside = np.clip(part.kv_lengths.array - first, 0, last - first)
        if (inside < last - first).any():
            mask = both(mask, Lengths(freeze(inside)))
    return mask
