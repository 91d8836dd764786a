"""Arrays inside frozen, hashable, serialisable masks."""

from __future__ import annotations

import hashlib
import sys
from operator import index
from typing import Any

import numpy as np
from msgspec import Struct

from attnbench.errors import InvalidWorkload
from attnbench.masks.base import LARGEST_SIZE
from attnbench.tracing import being_traced


class FrozenArray(Struct, frozen=True):
    """A NumPy array as bytes (booleans packed to bits), so that a mask can be hashed, compared and written to JSON."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes

    @property
    def array(self) -> np.ndarray:
        """A fresh copy of the array."""
        if self.dtype == "bool":
            bits = np.unpackbits(np.frombuffer(self.data, np.uint8), count=int(np.prod(self.shape)))
            return bits.astype(bool).reshape(self.shape)
        return np.frombuffer(self.data, self.dtype).reshape(self.shape).copy()

    @property
    def digest(self) -> str:
        """Eight hex digits of the content, for ids."""
        return hashlib.sha256(repr((self.shape, self.dtype)).encode() + self.data).hexdigest()[:8]


def freeze(array: np.ndarray) -> FrozenArray:
    """Copy an array into a FrozenArray."""
    array = np.ascontiguousarray(array)
    data = np.packbits(array).tobytes() if array.dtype == bool else array.tobytes()
    return FrozenArray(array.shape, str(array.dtype), data)


def to_numpy(values: Any, what: str) -> np.ndarray:
    """NumPy view of a list, a NumPy or JAX array, or a torch tensor on any device."""
    if hasattr(values, "detach"):
        if being_traced():
            raise InvalidWorkload(f"{what} must be known before torch.compile traces: build masks of arrays outside.")
        values = values.detach().cpu()
        values = values.float() if values.dtype.is_floating_point and values.dtype.itemsize < 4 else values
    try:
        array = np.asarray(values)
    except Exception as error:
        raise InvalidWorkload(
            f"{what} must be concrete numbers (build masks outside jit), not {type(values).__name__}."
        ) from error
    if array.dtype.name == "bfloat16":  # JAX's own NumPy type, which NumPy does not count as floating
        array = array.astype(np.float32)
    if array.dtype == object:
        raise InvalidWorkload(f"{what} must be a rectangular array of numbers.")
    return array


def check_constant(values: Any, what: str) -> None:
    """A torch tensor that wants gradients is refused while they are recorded: they would be lost without a word."""
    if getattr(values, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise InvalidWorkload(
            f"{what} is a constant and gives no gradients, but this tensor wants some: pass it with .detach()."
        )


def whole_number(value: Any, what: str) -> int:
    """As a Python int: of NumPy and the like too, but nothing is rounded, parsed or taken for 0 and 1."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise InvalidWorkload(f"{what} must be a whole number, not {value!r}.")
    if abs(number) > LARGEST_SIZE:
        raise InvalidWorkload(f"{what} can be {LARGEST_SIZE} at most, not {number}.")
    return number


def integers(values: Any, what: str, ndim: tuple[int, ...]) -> FrozenArray:
    """Whole numbers, frozen as int32; one-dimensional input becomes one batch row when two axes are wanted."""
    array = to_numpy(values, what)
    if array.dtype.kind not in "iub" or array.ndim not in ndim or array.size == 0:
        axes = " or ".join(str(n) for n in ndim)
        raise InvalidWorkload(f"{what} must be whole numbers with {axes} axes, not {array.dtype} with {array.ndim}.")
    if array.dtype.kind != "b" and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
        raise InvalidWorkload(f"{what} must fit 32 bits.")
    return freeze(array.astype(np.int32))
