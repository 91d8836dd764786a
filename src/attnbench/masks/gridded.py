"""Masks that carry an array over pairs: blocks (one bit per block) and dense (one value per pair)."""

from __future__ import annotations

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.base import Mask, MaskShape, Namespace, Predicate
from attnbench.masks.data import FrozenArray


def _axes_of(array: FrozenArray) -> tuple[int, ...]:
    return (1,) * (4 - len(array.shape)) + array.shape


class Blocks(Mask, frozen=True, tag="blocks"):
    """The block of (i, j) is kept: block_mask is [q blocks, kv blocks], with optional head and batch axes before."""

    block_mask: FrozenArray
    block_size: int

    @property
    def id(self) -> str:
        return f"blocks{self.block_size}-{self.block_mask.digest}"

    @property
    def title(self) -> str:
        """With the share of blocks that are dropped."""
        return f"{self.id} ({100 * (1 - self.block_mask.array.mean()):.0f} % of the blocks dropped)"

    @property
    def per_batch(self) -> bool:
        return _axes_of(self.block_mask)[0] > 1

    @property
    def per_head(self) -> bool:
        return _axes_of(self.block_mask)[1] > 1

    def check(self, shape: MaskShape) -> None:
        if self.block_size < 1:
            raise InvalidWorkload(f"block_size must be at least 1, not {self.block_size}.")
        wanted = (-(-shape.q_len // self.block_size), -(-shape.kv_len // self.block_size))
        axes = _axes_of(self.block_mask)
        if axes[0] not in (1, shape.batch) or axes[1] not in (1, shape.heads) or axes[2:] != wanted:
            raise InvalidWorkload(
                f"block_mask {self.block_mask.shape} does not fit {shape.batch} batches, {shape.heads} heads and "
                f"{wanted[0]} x {wanted[1]} blocks of {self.block_size}."
            )

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        axes, size = _axes_of(self.block_mask), self.block_size
        kept = namespace.asarray(self.block_mask.array.reshape(axes))
        per_batch, per_head = int(axes[0] > 1), int(axes[1] > 1)
        return lambda b, h, q, kv: kept[b * per_batch, h * per_head, q // size, kv // size]

    def pairs(self, shape: MaskShape) -> int:
        axes = _axes_of(self.block_mask)
        height, width = (
            np.minimum(self.block_size, length - self.block_size * np.arange(count))
            for length, count in zip((shape.q_len, shape.kv_len), axes[2:])
        )
        kept = self.block_mask.array.reshape(axes).astype(np.int64)
        return int(np.einsum("bhqk,q,k->", kept, height, width)) * (shape.batch // axes[0]) * (shape.heads // axes[1])

    def count(self, shape: MaskShape, low: np.ndarray, high: np.ndarray) -> int:
        """Exact number of pairs in kept blocks whose key lies in the row's interval ([b or 1, q]), never negative."""
        axes = _axes_of(self.block_mask)
        kept = self.block_mask.array.reshape(axes)
        batch = max(axes[0], len(low))
        edges = np.minimum(np.arange(axes[3] + 1) * self.block_size, shape.kv_len)
        total = 0
        for row in range(axes[2]):
            queries = slice(row * self.block_size, (row + 1) * self.block_size)
            inside = np.clip(edges, low[:, queries, None], np.maximum(low, high)[:, queries, None])
            seen = np.diff(inside, axis=-1).sum(axis=1)
            total += int((kept[:, :, row] * np.broadcast_to(seen, (batch, axes[3]))[:, None]).sum())
        return total * (shape.batch // batch) * (shape.heads // axes[1])


class Dense(Mask, frozen=True, tag="dense"):
    """Any boolean (visible) or additive (bias) array that broadcasts to [b, h, q, kv]."""

    values: FrozenArray

    @property
    def id(self) -> str:
        return f"{'bias' if self.weighted else 'dense'}-{self.values.digest}"

    @property
    def weighted(self) -> bool:
        return self.values.dtype != "bool"

    @property
    def per_batch(self) -> bool:
        return _axes_of(self.values)[0] > 1

    @property
    def per_head(self) -> bool:
        return _axes_of(self.values)[1] > 1

    @property
    def per_block(self) -> bool:
        return False

    def check(self, shape: MaskShape) -> None:
        if any(have not in (1, want) for have, want in zip(_axes_of(self.values), shape)):
            raise InvalidWorkload(
                f"dense mask {self.values.shape} does not broadcast to [b, h, q, kv] = {list(shape)}."
            )

    def _lookup(self, namespace: Namespace, array: np.ndarray) -> Predicate:
        axes = _axes_of(self.values)
        values = namespace.asarray(array.reshape(axes))
        use = [int(size > 1) for size in axes]
        return lambda b, h, q, kv: values[b * use[0], h * use[1], q * use[2], kv * use[3]]

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        values = self.values.array
        return self._lookup(namespace, values != -np.inf if self.weighted else values)

    def log_weight(self, shape: MaskShape, namespace: Namespace) -> Predicate | None:
        if not self.weighted:
            return None
        values = self.values.array
        return self._lookup(namespace, np.where(values == -np.inf, np.zeros((), values.dtype), values))
