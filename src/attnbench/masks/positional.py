"""Masks that are a rule over positions: full, causal, window, prefix."""

from __future__ import annotations

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.base import (
    LARGEST_SIZE,
    Align,
    Mask,
    MaskShape,
    Namespace,
    Predicate,
    check_align,
    query_offset,
)

Interval = tuple[np.ndarray, np.ndarray]


def _rows(align: Align, shape: MaskShape) -> np.ndarray:
    return (np.arange(shape.q_len) + query_offset(align, shape))[None]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_SIZE


def _suffix(align: Align) -> str:
    return "" if align == "bottom-right" else "-topleft"


class Full(Mask, frozen=True, tag="full"):
    """Every pair."""

    @property
    def id(self) -> str:
        return "full"

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        return lambda b, h, q, kv: (q >= 0) & (kv >= 0)

    def interval(self, shape: MaskShape) -> Interval:
        return np.zeros((1, shape.q_len), np.int64), np.full((1, shape.q_len), shape.kv_len)


class Causal(Mask, frozen=True, tag="causal"):
    """j <= i after alignment."""

    align: Align = "bottom-right"

    def __post_init__(self) -> None:
        check_align(self.align)

    @property
    def id(self) -> str:
        return "causal" + _suffix(self.align)

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        offset = query_offset(self.align, shape)
        return lambda b, h, q, kv: kv <= q + offset

    def interval(self, shape: MaskShape) -> Interval:
        rows = _rows(self.align, shape)
        return np.zeros_like(rows), rows + 1


class Window(Mask, frozen=True, tag="window"):
    """i - left <= j <= i + right after alignment; None means no bound on that side."""

    left: int | None
    right: int | None = 0
    align: Align = "bottom-right"

    def __post_init__(self) -> None:
        check_align(self.align)
        for side in (self.left, self.right):
            if side is not None and not _is_count(side):
                raise InvalidWorkload(
                    f"a window reaches 0 or more keys (None: no bound), {LARGEST_SIZE} at most, not {side!r}."
                )

    @property
    def id(self) -> str:
        left, right = ("all" if side is None else side for side in (self.left, self.right))
        return f"window{left}:{right}" + _suffix(self.align)

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        offset = query_offset(self.align, shape)
        far = shape.q_len + shape.kv_len
        left = far if self.left is None else self.left
        right = far if self.right is None else self.right
        return lambda b, h, q, kv: (kv >= q + (offset - left)) & (kv <= q + (offset + right))

    def interval(self, shape: MaskShape) -> Interval:
        rows = _rows(self.align, shape)
        far = shape.q_len + shape.kv_len
        return rows - (far if self.left is None else self.left), rows + (far if self.right is None else self.right) + 1


class Prefix(Mask, frozen=True, tag="prefix"):
    """j < n, or j <= i after alignment."""

    n: int
    align: Align = "bottom-right"

    def __post_init__(self) -> None:
        check_align(self.align)
        if not _is_count(self.n):
            raise InvalidWorkload(f"a prefix has 0 or more keys, {LARGEST_SIZE} at most, not {self.n!r}.")

    @property
    def id(self) -> str:
        return f"prefix{self.n}" + _suffix(self.align)

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        offset, n = query_offset(self.align, shape), self.n
        return lambda b, h, q, kv: (kv < n) | (kv <= q + offset)

    def interval(self, shape: MaskShape) -> Interval:
        rows = _rows(self.align, shape)
        return np.zeros_like(rows), np.maximum(rows + 1, self.n)
