"""Is a result the verified one but for rounding? Every row is looked at, on the device, in blocks; only the norms of
rows come to the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import array_api_compat
import numpy as np

from attnbench.frameworks import Framework
from attnbench.spec import Array, Layout
from attnbench.verifying.tolerance import SLACK, Limits, row_scales, typical_row

SMALL = 1e-3
"""Of a typical batch row's size: less than that is compared with it instead."""
BLOCK_ELEMENTS = 1 << 24
LARGE_ROW, MISSING = 0.25, 0.5
"""A row of at least this share of a typical one that is off by half of itself is another row, however coarse the dtype
is: rounding that differs from call to call does not do that."""


class Apart(NamedTuple):
    """Where two results differ, by what share, and what was allowed."""

    place: tuple[int, ...]
    """Index of a row, or of a whole batch row."""
    share: float
    allowed: float


def spot(differs: Apart, layout: Layout) -> str:
    """Words for the place, in arrays of a layout."""
    if len(differs.place) != 3:
        return f"part {', '.join(str(n) for n in differs.place)}"
    batch, token, head = differs.place if layout == "bshd" else (differs.place[0], *differs.place[:0:-1])
    return f"batch {batch}, head {head}, row {token}"


class _Rows(NamedTuple):
    size: np.ndarray
    off: np.ndarray
    largest: float
    largest_off: tuple[float, tuple[int, ...]]


def apart(framework: Framework, got: Array, good: Array, limits: Limits, dtype: str) -> Apart | None:
    """Where `got` is not `good` [..., width]; None when their rows, elements and batch rows all agree."""
    if good.ndim < 2:
        got, good = got.reshape(1, -1), good.reshape(1, -1)
    rows = _rows(framework, got, good, "float64" if dtype == "float64" else "float32")
    limits = limits.widened(SLACK)
    return _row_apart(rows, limits.row) or _element_apart(rows, limits.largest) or _whole_apart(rows, limits.relative)


def _rows(framework: Framework, got: Array, good: Array, wide: str) -> _Rows:
    shape = tuple(good.shape)
    size, off = np.zeros(shape[:-1]), np.zeros(shape[:-1])
    largest, worst = 0.0, (0.0, (0,) * (len(shape) - 1))
    xp = array_api_compat.array_namespace(good)
    for block in _blocks(shape):
        right = framework.cast(good[block], wide)
        difference = framework.cast(got[block], wide) - right
        size[block], off[block] = (_norms(framework, xp, array) for array in (right, difference))
        largest = max(largest, float(framework.numpy(xp.max(xp.abs(right)))))
        most = float(framework.numpy(xp.max(xp.abs(difference))))
        if not most <= worst[0]:
            corner = np.unravel_index(int(np.argmax(off[block])), off[block].shape)
            start = (*(part.start for part in block), *(0 for _ in range(len(corner) - len(block))))
            worst = most, tuple(int(n) + first for n, first in zip(corner, start))
    return _Rows(size, off, largest, worst)


def _norms(framework: Framework, xp, array: Array) -> np.ndarray:  # noqa: ANN001
    return np.sqrt(framework.numpy(xp.sum(array * array, axis=-1)).astype(np.float64))


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Slices of the first axis, and of the second where one of the first is too large already."""
    first, *others, width = shape
    count = max(1, BLOCK_ELEMENTS // max(1, math.prod(others) * width))
    second = others[0] if others and count == 1 else 1
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(others[1:]) * width))
    for start in range(0, first, count):
        outer = slice(start, start + count)
        if second == 1:
            yield (outer,)
        else:
            yield from ((outer, slice(at, at + step)) for at in range(0, second, step))


def _row_apart(rows: _Rows, limit: float) -> Apart | None:
    share = rows.off / row_scales(rows.size)
    large = rows.size >= LARGE_ROW * typical_row(rows.size)
    allowed = np.where(large & math.isfinite(limit), min(limit, MISSING), limit)
    return _first(share, allowed)


def _element_apart(rows: _Rows, limit: float) -> Apart | None:
    most, index = rows.largest_off
    share = most / rows.largest if rows.largest else math.inf if most else 0.0
    return None if share <= limit else Apart(index, share, limit)


def _whole_apart(rows: _Rows, limit: float) -> Apart | None:
    """Each batch row of an array with batch, tokens and heads; any other as one."""
    count = rows.size.shape[0] if rows.size.ndim == 3 else 1
    size, off = (np.linalg.norm(norms.reshape(count, -1), axis=1) for norms in (rows.size, rows.off))
    size = np.maximum(size, SMALL * np.median(size))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(off == 0, 0.0, off / size)
    return _first(share, np.full(count, limit))


def _first(share: np.ndarray, allowed: np.ndarray) -> Apart | None:
    over = ~(share <= allowed)
    if not over.any():
        return None
    index = np.unravel_index(int(np.argmax(over)), over.shape)
    return Apart(tuple(int(n) for n in index), float(share[index]), float(allowed[index]))
