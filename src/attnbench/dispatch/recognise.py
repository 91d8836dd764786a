"""An array of visible pairs -> the mask that says the same: what a model meant when it made the array."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnbench import masks
from attnbench.masks import AnyMask, MaskShape
from attnbench.masks.base import to_numpy

ALIGNMENTS = ("bottom-right", "top-left")
HIDES = -6e4
"""A number added to a logit that leaves nothing of its weight; the least of float16 is below."""


def recognise(array: Any, shape: MaskShape) -> AnyMask:
    """Full, causal or a window, with keys that are padding taken out, if that is exactly the array; else `dense`."""
    values = to_numpy(array, "the mask")
    values = values.reshape((1,) * (4 - values.ndim) + values.shape)
    if values.dtype != bool:
        if not ((values == 0) | (values <= HIDES)).all():
            return masks.dense(values)
        if (values <= HIDES).all(-1).any() and not np.isneginf(values.min()):
            return masks.dense(values)  # a row of large negative numbers is the mean of V, one of -inf is 0
        values = values == 0
    if values.shape[1] > 1:
        return masks.dense(values)
    seen = np.broadcast_to(values, (values.shape[0], 1, shape.q_len, shape.kv_len))[:, 0]
    real = _real_keys(np.any(seen, axis=1), shape)
    for mask in _candidates(seen, shape):
        whole = mask & real
        if (np.broadcast_to(whole.array(shape), (shape.batch, 1, *seen.shape[1:]))[:, 0] == seen).all():
            return whole  # pyright: ignore[reportReturnType]
    return masks.dense(values)


def _candidates(seen: np.ndarray, shape: MaskShape) -> list[AnyMask]:
    found: list[AnyMask] = [masks.full(), *(masks.causal(align) for align in ALIGNMENTS)]  # pyright: ignore
    if not seen.any():
        return found
    _, rows, keys = np.nonzero(seen)
    for align in ALIGNMENTS:
        at = rows + (shape.kv_len - shape.q_len if align == "bottom-right" else 0)
        left, right = int((at - keys).max()), int((keys - at).max())
        if left >= 0 and right >= 0:
            found += [masks.window(left, right, align), masks.window(left, None, align)]  # pyright: ignore
    return found


def _real_keys(keys: np.ndarray, shape: MaskShape) -> AnyMask:
    """Keys that any query sees, [b or 1, kv]."""
    if keys.all():
        return masks.full()
    lengths = keys.sum(axis=1)
    if len(keys) == shape.batch and (keys == (np.arange(shape.kv_len) < lengths[:, None])).all():
        return masks.lengths(lengths)
    return masks.valid(keys)
