"""Masks that hold an array: one value per token (documents, lengths, ...), one per block, or one per pair."""

from __future__ import annotations

from collections.abc import Callable
from operator import eq, le
from typing import Any

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.base import FrozenArray, Mask, MaskShape, Namespace, Predicate

FEW = 6
"""Largest number of sizes that a title lists."""


def by_lengths(lengths: Any) -> Predicate:
    """Return the predicate of `lengths` for an array [b] of any framework."""
    return lambda b, h, q, kv: kv < lengths[b]


def by_keys(keys: Any) -> Predicate:
    """Return the predicate of `valid` for booleans [b or 1, kv] of any framework."""
    per_row = int(keys.shape[0] > 1)
    return lambda b, h, q, kv: keys[b * per_row, kv]


def by_ids(sees: Callable[[Any, Any], Any], ids: Any, q_ids: Any) -> Predicate:
    """Return the predicate `sees(id of the key, id of the query)` for arrays [b or 1, tokens] of any framework."""
    k_batch, q_batch = int(ids.shape[0] > 1), int(q_ids.shape[0] > 1)
    return lambda b, h, q, kv: sees(ids[b * k_batch, kv], q_ids[b * q_batch, q])


def _check_rows(name: str, array: np.ndarray, batch: int, length: int | None, axis: str) -> None:
    if array.shape[0] not in (1, batch):
        raise InvalidWorkload(f"{name} has {array.shape[0]} batch rows, the workload has {batch}.")
    if length is not None and array.shape[1] != length:
        raise InvalidWorkload(f"{name} covers {array.shape[1]} tokens, {axis} is {length}.")


def _listed(sizes: np.ndarray) -> str:
    return ", ".join(map(str, sizes.tolist()))


SEES_ID: dict[str, Callable[[Any, Any], Any]] = {"documents": eq, "block_causal": le}
"""Kind of mask -> whether a query of the second id sees a key of the first."""


class _TokenIds(Mask, frozen=True):
    """Integer ids of keys and queries per batch row ([b or 1, tokens]); q_ids defaults to the last q_len of ids."""

    ids: FrozenArray
    q_ids: FrozenArray | None = None

    @property
    def id(self) -> str:
        other = "" if self.q_ids is None else f"+{self.q_ids.digest}"
        return f"{self.kinds[0].replace('_', '')}-{self.ids.digest}{other}"

    @property
    def title(self) -> str:
        """Kind and sizes of the blocks if all rows have the same few blocks; else the id."""
        rows = self.ids.array
        if self.q_ids is not None or len(rows) > 1 or np.any(np.diff(rows) < 0):
            return self.id
        sizes = np.unique(rows, return_counts=True)[1]
        return f"{self.kinds[0]} {_listed(sizes)}" if len(sizes) <= FEW else self.id

    @property
    def per_batch(self) -> bool:
        return self.ids.shape[0] > 1 or (self.q_ids is not None and self.q_ids.shape[0] > 1)

    @property
    def per_block(self) -> bool:
        return not np.any(np.diff(self.ids.array, axis=1) < 0)

    def check(self, shape: MaskShape) -> None:
        _check_rows(f"{self.kinds[0]} ids", self.ids.array, shape.batch, shape.kv_len, "kv_len")
        if self.q_ids is not None:
            _check_rows(f"{self.kinds[0]} q_ids", self.q_ids.array, shape.batch, shape.q_len, "q_len")
        elif shape.q_len > shape.kv_len:
            raise InvalidWorkload(
                f"{self.kinds[0]} needs q_ids: q_len {shape.q_len} is more than kv_len {shape.kv_len}."
            )

    def query_ids(self, shape: MaskShape) -> np.ndarray:
        """Return the ids of the queries, [b or 1, q_len]."""
        return self.ids.array[:, shape.kv_len - shape.q_len :] if self.q_ids is None else self.q_ids.array

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        q_ids = namespace.asarray(np.ascontiguousarray(self.query_ids(shape)))
        return by_ids(SEES_ID[self.kinds[0]], namespace.asarray(self.ids.array), q_ids)


def _sorted_bounds(keys: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return first and end of the keys with each query's id, both [b, q]; None if the keys' ids are not sorted."""
    if np.any(np.diff(keys, axis=1) < 0):
        return None
    rows = max(len(keys), len(queries))
    pairs = list(zip(np.broadcast_to(keys, (rows, keys.shape[1])), np.broadcast_to(queries, (rows, queries.shape[1]))))
    low = np.stack([np.searchsorted(k, q, side="left") for k, q in pairs])
    high = np.stack([np.searchsorted(k, q, side="right") for k, q in pairs])
    return low, high


class BlockCausal(_TokenIds, frozen=True, tag="block_causal"):
    """Keys of the same or an earlier block, ids[j] <= q_ids[i]: openpi's mask, its ids the running sum of `mask_ar`."""

    def keys_of_heads(self, shape: MaskShape) -> np.ndarray:
        return (self.ids.array <= self.query_ids(shape).max(axis=1, keepdims=True))[:, None]

    def interval(self, shape: MaskShape) -> tuple[np.ndarray, np.ndarray] | None:
        bounds = _sorted_bounds(self.ids.array, self.query_ids(shape))
        return None if bounds is None else (np.zeros_like(bounds[0]), bounds[1])


class Documents(_TokenIds, frozen=True, tag="documents"):
    """Keys of the same document, ids[j] == q_ids[i]: packed sequences."""

    def keys_of_heads(self, shape: MaskShape) -> np.ndarray:
        keys, queries = self.ids.array, self.query_ids(shape)
        rows = max(len(keys), len(queries))
        pairs = zip(np.broadcast_to(keys, (rows, keys.shape[1])), np.broadcast_to(queries, (rows, queries.shape[1])))
        return np.stack([np.isin(k, q) for k, q in pairs])[:, None]

    def interval(self, shape: MaskShape) -> tuple[np.ndarray, np.ndarray] | None:
        return _sorted_bounds(self.ids.array, self.query_ids(shape))


class Lengths(Mask, frozen=True, tag="lengths"):
    """Keys before a length per batch row, j < kv_lengths[b]: right padding."""

    kv_lengths: FrozenArray

    @property
    def id(self) -> str:
        return f"lengths-{self.kv_lengths.digest}"

    @property
    def title(self) -> str:
        """The length if all rows have the same, the lengths of a few rows, or the id."""
        lengths = self.kv_lengths.array
        shown = np.unique(lengths) if np.all(lengths == lengths[0]) else lengths
        return f"lengths {_listed(shown)}" if len(shown) <= FEW else self.id

    @property
    def per_batch(self) -> bool:
        return True

    def check(self, shape: MaskShape) -> None:
        lengths = self.kv_lengths.array
        if len(lengths) != shape.batch:
            raise InvalidWorkload(f"lengths has {len(lengths)} batch rows, the workload has {shape.batch}.")
        if lengths.min() < 0 or lengths.max() > shape.kv_len:
            raise InvalidWorkload(
                f"key lengths must lie in 0 ... {shape.kv_len}, not {lengths.min()} ... {lengths.max()}."
            )

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        return by_lengths(namespace.asarray(self.kv_lengths.array))

    def interval(self, shape: MaskShape) -> tuple[np.ndarray, np.ndarray]:
        high = np.repeat(self.kv_lengths.array[:, None].astype(np.int64), shape.q_len, axis=1)
        return np.zeros_like(high), high


class Valid(Mask, frozen=True, tag="valid"):
    """Keys that are marked valid per batch row, with holes anywhere."""

    keys: FrozenArray

    @property
    def id(self) -> str:
        return f"valid-{self.keys.digest}"

    @property
    def per_batch(self) -> bool:
        return self.keys.shape[0] > 1

    @property
    def per_block(self) -> bool:
        return False

    def check(self, shape: MaskShape) -> None:
        _check_rows("valid", self.keys.array, shape.batch, shape.kv_len, "kv_len")

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        return by_keys(namespace.asarray(self.keys.array))

    def key_filter(self, shape: MaskShape) -> np.ndarray:
        return self.keys.array


def _axes_of(array: FrozenArray) -> tuple[int, ...]:
    return (1,) * (4 - len(array.shape)) + array.shape


class Blocks(Mask, frozen=True, tag="blocks"):
    """Kept blocks of pairs: block_mask is [q blocks, kv blocks], optionally with head and batch axes before."""

    block_mask: FrozenArray
    block_size: int

    @property
    def id(self) -> str:
        return f"blocks{self.block_size}-{self.block_mask.digest}"

    @property
    def title(self) -> str:
        """The id and the share of blocks that are dropped."""
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

    def keys_of_heads(self, shape: MaskShape) -> np.ndarray:
        kept = self.block_mask.array.reshape(_axes_of(self.block_mask)).any(axis=2)
        return kept.repeat(self.block_size, axis=-1)[..., : shape.kv_len]

    def pairs(self, shape: MaskShape) -> int:
        axes = _axes_of(self.block_mask)
        height, width = (
            np.minimum(self.block_size, length - self.block_size * np.arange(count))
            for length, count in zip((shape.q_len, shape.kv_len), axes[2:])
        )
        kept = self.block_mask.array.reshape(axes).astype(np.int64)
        return int(np.einsum("bhqk,q,k->", kept, height, width)) * (shape.batch // axes[0]) * (shape.heads // axes[1])

    def count(self, shape: MaskShape, low: np.ndarray, high: np.ndarray) -> int:
        """Return the exact number of pairs in kept blocks whose key lies in the row's interval, [b or 1, q]."""
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

    _count_in = count


class Dense(Mask, frozen=True, tag="dense"):
    """A boolean (True: visible) or additive array that broadcasts to [b, h, q, kv]."""

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

    def keys_of_heads(self, shape: MaskShape) -> np.ndarray:
        values = self.values.array.reshape(_axes_of(self.values))
        seen = (values != -np.inf if self.weighted else values).any(axis=2)
        return np.broadcast_to(seen, (*seen.shape[:2], shape.kv_len))

    def log_weight(self, shape: MaskShape, namespace: Namespace) -> Predicate | None:
        if not self.weighted:
            return None
        values = self.values.array
        return self._lookup(namespace, np.where(values == -np.inf, np.zeros((), values.dtype), values))
