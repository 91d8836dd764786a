"""Visible pairs of a mask and the keys that some query sees: exact counts, remembered for masks asked for again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps

import msgspec
import numpy as np

from attnbench.masks import AnyMask, MaskShape

MOST_COUNTS = 4096
"""Number of counts that are kept before all are forgotten."""


def _remembered(count: Callable[[AnyMask, MaskShape], int]) -> Callable[[AnyMask, MaskShape], int]:
    """Cache counts by a digest of the mask: a cache of large masks themselves would keep them in memory."""
    known: dict[tuple[bytes, MaskShape], int] = {}

    @wraps(count)
    def run(mask: AnyMask, shape: MaskShape) -> int:
        key = hashlib.sha256(msgspec.msgpack.encode(mask)).digest(), shape
        found = known.get(key)
        if found is None:
            if len(known) >= MOST_COUNTS:
                known.clear()
            found = known[key] = count(mask, shape)
        return found

    return run


@_remembered
def pairs(mask: AnyMask, shape: MaskShape) -> int:
    """Return the exact number of visible pairs, cached because a sweep asks for the same masks many times."""
    return mask.pairs(shape)


@_remembered
def seen_keys(mask: AnyMask, shape: MaskShape) -> int:
    """Return the number of (batch row, key) places that some query sees, so that they must be read.

    Exact for masks made of intervals and key filters; dilated, blocks and dense parts are counted as visible.
    """
    seen = np.ones((1, shape.kv_len), bool)
    for part in mask.split():
        if (keys := part.key_filter(shape)) is not None:
            seen = seen & keys
        elif (interval := part.interval(shape)) is not None:
            seen = seen & _covered(*interval, shape.kv_len)
    return int(seen.sum()) * (shape.batch // len(seen))


def _covered(low: np.ndarray, high: np.ndarray, kv_len: int) -> np.ndarray:
    """Return [b or 1, kv] whether a key lies in some row's interval, by adding 1 at each start and -1 at each end."""
    low, high = (np.clip(edge, 0, kv_len) for edge in np.broadcast_arrays(low, high))
    high = np.maximum(low, high)
    steps = np.zeros((len(low), kv_len + 1), np.int64)
    rows = np.broadcast_to(np.arange(len(low))[:, None], low.shape)
    np.add.at(steps, (rows, low), 1)
    np.add.at(steps, (rows, high), -1)
    return np.cumsum(steps, axis=1)[:, :kv_len] > 0
