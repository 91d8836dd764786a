"""Masks that carry an array over tokens: block_causal, documents, lengths, valid."""

from __future__ import annotations

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.base import Mask, MaskShape, Namespace, Predicate
from attnbench.masks.data import FrozenArray

FEW = 6
"""Numbers that a title lists."""


def _check_rows(name: str, array: np.ndarray, batch: int, length: int | None, axis: str) -> None:
    if array.shape[0] not in (1, batch):
        raise InvalidWorkload(f"{name} has {array.shape[0]} batch rows, the workload has {batch}.")
    if length is not None and array.shape[1] != length:
        raise InvalidWorkload(f"{name} covers {array.shape[1]} tokens, {axis} is {length}.")


def _listed(sizes: np.ndarray) -> str:
    return ", ".join(map(str, sizes.tolist()))


class _TokenIds(Mask, frozen=True):
    """Integer ids of keys and queries, per batch row ([b or 1, tokens]); q_ids defaults to the last q_len of ids."""

    ids: FrozenArray
    q_ids: FrozenArray | None = None

    @property
    def id(self) -> str:
        other = "" if self.q_ids is None else f"+{self.q_ids.digest}"
        return f"{self.kinds[0].replace('_', '')}-{self.ids.digest}{other}"

    @property
    def title(self) -> str:
        """The sizes of consecutive blocks, where all rows have the same few."""
        rows = self.ids.array
        if self.q_ids is not None or len(rows) > 1 or np.any(np.diff(rows) < 0):
            return self.id
        sizes = np.unique(rows, return_counts=True)[1]
        return f"{self.kinds[0]} {_listed(sizes)}" if len(sizes) <= FEW else self.id

    @property
    def per_batch(self) -> bool:
        return self.ids.shape[0] > 1 or (self.q_ids is not None and self.q_ids.shape[0] > 1)

    def check(self, shape: MaskShape) -> None:
        _check_rows(f"{self.kinds[0]} ids", self.ids.array, shape.batch, shape.kv_len, "kv_len")
        if self.q_ids is not None:
            _check_rows(f"{self.kinds[0]} q_ids", self.q_ids.array, shape.batch, shape.q_len, "q_len")
        elif shape.q_len > shape.kv_len:
            raise InvalidWorkload(
                f"{self.kinds[0]} needs q_ids: q_len {shape.q_len} is more than kv_len {shape.kv_len}."
            )

    def query_ids(self, shape: MaskShape) -> np.ndarray:
        """[b or 1, q_len]"""
        return self.ids.array[:, shape.kv_len - shape.q_len :] if self.q_ids is None else self.q_ids.array

    def _lookups(self, shape: MaskShape, namespace: Namespace) -> tuple[Predicate, Predicate]:
        queries, keys = self.query_ids(shape), self.ids.array
        q_ids, k_ids = namespace.asarray(np.ascontiguousarray(queries)), namespace.asarray(keys)
        q_batch, k_batch = int(len(queries) > 1), int(len(keys) > 1)
        return (lambda b, h, q, kv: q_ids[b * q_batch, q]), (lambda b, h, q, kv: k_ids[b * k_batch, kv])


def _sorted_bounds(keys: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """[b, q] positions where each query's id begins and ends among sorted keys; None when keys are unsorted."""
    if np.any(np.diff(keys, axis=1) < 0):
        return None
    rows = max(len(keys), len(queries))
    pairs = list(zip(np.broadcast_to(keys, (rows, keys.shape[1])), np.broadcast_to(queries, (rows, queries.shape[1]))))
    low = np.stack([np.searchsorted(k, q, side="left") for k, q in pairs])
    high = np.stack([np.searchsorted(k, q, side="right") for k, q in pairs])
    return low, high


class BlockCausal(_TokenIds, frozen=True, tag="block_causal"):
    """ids[j] <= q_ids[i]: openpi's mask, ids being the running sum of `mask_ar`."""

    @property
    def per_block(self) -> bool:
        return not np.any(np.diff(self.ids.array, axis=1) < 0)

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        query, key = self._lookups(shape, namespace)
        return lambda b, h, q, kv: key(b, h, q, kv) <= query(b, h, q, kv)

    def interval(self, shape: MaskShape) -> tuple[np.ndarray, np.ndarray] | None:
        bounds = _sorted_bounds(self.ids.array, self.query_ids(shape))
        return None if bounds is None else (np.zeros_like(bounds[0]), bounds[1])


class Documents(_TokenIds, frozen=True, tag="documents"):
    """q_ids[i] == ids[j]: packed sequences."""

    @property
    def per_block(self) -> bool:
        return not np.any(np.diff(self.ids.array, axis=1) < 0)

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        query, key = self._lookups(shape, namespace)
        return lambda b, h, q, kv: key(b, h, q, kv) == query(b, h, q, kv)

    def interval(self, shape: MaskShape) -> tuple[np.ndarray, np.ndarray] | None:
        return _sorted_bounds(self.ids.array, self.query_ids(shape))


class Lengths(Mask, frozen=True, tag="lengths"):
    """j < kv_lengths[b]: right padding."""

    kv_lengths: FrozenArray

    @property
    def id(self) -> str:
        return f"lengths-{self.kv_lengths.digest}"

    @property
    def title(self) -> str:
        """The length of all rows, or of each of a few."""
        lengths = self.kv_lengths.array
        shown = np.unique(lengths) if np.all(lengths == lengths[0]) else lengths
        return f"lengths {_listed(shown)}" if len(shown) <= FEW else self.id

    @property
    def per_batch(self) -> bool:
        return True

    def check(self, shape: MaskShape) -> None:
        lengths = self.kv_lengths.array
        if len(lengths) != shape.batch:
            raise InvalidWorkload(f"lengths names {len(lengths)} batch rows, the workload has {shape.batch}.")
        if lengths.min() < 0 or lengths.max() > shape.kv_len:
            raise InvalidWorkload(
                f"key lengths must lie in 0 ... {shape.kv_len}, not {lengths.min()} ... {lengths.max()}."
            )

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        lengths = namespace.asarray(self.kv_lengths.array)
        return lambda b, h, q, kv: kv < lengths[b]

    def interval(self, shape: MaskShape) -> tuple[np.ndarray, np.ndarray]:
        high = np.repeat(self.kv_lengths.array[:, None].astype(np.int64), shape.q_len, axis=1)
        return np.zeros_like(high), high


class Valid(Mask, frozen=True, tag="valid"):
    """mask[b, j]: holes anywhere."""

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
        keys, per_row = namespace.asarray(self.keys.array), int(self.keys.shape[0] > 1)
        return lambda b, h, q, kv: keys[b * per_row, kv]

    def key_filter(self, shape: MaskShape) -> np.ndarray:
        return self.keys.array
