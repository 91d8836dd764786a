"""Biases beside which float32 does not hold the logits any more: -1e9 and the smallest float to hide, +1e30 to force.

A softmax does not change when a number is added to a whole row. So the largest bias that a row sees is subtracted from
the row if it is large, in float64, and added to the row's LSE. Else a logit beside -1e9 would be rounded away, a
backward pass that computes exp(logit - LSE) would be wrong by as many times as there are keys, since an LSE of
-1e9 + log n is -1e9, and a bias beyond the range of float32 would be infinite.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from attnbench.masks.arrays import Dense
from attnbench.masks.base import COUNT_BLOCK, Mask, MaskShape

LARGE = 64.0
"""Largest bias that is left as it is: float32 rounds a logit up to here by less than 1e-5."""


class Shifted(NamedTuple):
    """The log-weights of a mask without the part that is added to whole rows; axes [b or 1, h or 1, q, kv]."""

    weight: np.ndarray
    """Log-weights of at most LARGE, within the finite range of the dtype; 0 if the pair is hidden."""
    top: np.ndarray
    """Number that was subtracted from each row ([b or 1, h or 1, q]), within the finite range of the dtype."""


@lru_cache(maxsize=256)
def has_large_bias(mask: Mask) -> bool:
    """Return whether the additive arrays of a mask may add more than LARGE, or less than -LARGE, to a logit."""
    arrays = [part.values.array for part in mask.split() if isinstance(part, Dense) and part.weighted]
    return sum(float(np.abs(array[array != -np.inf]).max(initial=0)) for array in arrays) > LARGE


def shifted(mask: Mask, shape: MaskShape, dtype: Any) -> Shifted | None:
    """Return the log-weights in a NumPy dtype with large rows shifted; None if the mask has no large bias."""
    if not has_large_bias(mask):
        return None
    batch, heads = shape.batch if mask.per_batch else 1, shape.heads if mask.per_head else 1
    weight = np.zeros((batch, heads, shape.q_len, shape.kv_len), dtype)
    top = np.zeros(weight.shape[:3], dtype)
    step = max(1, COUNT_BLOCK // (batch * heads * shape.kv_len))
    for start in range(0, shape.q_len, step):
        rows = np.arange(start, min(start + step, shape.q_len))
        bias = mask.bias(shape, rows)
        largest = bias.max(axis=-1)
        largest[(largest == -np.inf) | (np.abs(largest) <= LARGE)] = 0.0
        with np.errstate(over="ignore"):  # the difference of two biases may be beyond float64: it is hidden either way
            rest = np.where(bias == -np.inf, 0.0, bias - largest[..., None])
        weight[:, :, rows], top[:, :, rows] = finite(rest, dtype), finite(largest, dtype)
    return Shifted(weight, top)


def finite(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array in a dtype; values beyond the dtype's range are clipped to it."""
    return np.clip(array, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)
