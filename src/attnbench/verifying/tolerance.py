"""Tolerances: the error against float64 may be a small multiple of the plain implementation's own error.

Three norms, because each misses something: relative Frobenius (the whole), maximum (one element), worst row (a row of
small values that is simply missing). `apart` compares a later result with the verified one by the same norms: it looks
at every row, on the device, in blocks, and only the norms of rows come to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import array_api_compat
import numpy as np

from attnbench.frameworks import Framework
from attnbench.spec import Array, Layout

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOOR_ULPS = {"float64": 64, "float32": 16, "float16": 2, "bfloat16": 2}
"""Ulp added to the allowed error of one element or one row."""
WHOLE_FLOOR_ULPS = {"float64": 32, "float32": 8, "float16": 0.5, "bfloat16": 0.25}
"""Ulp added to the allowed error of the whole: rounding averages out there, so it explains less. The worst kernel
recorded on an H200 in bfloat16 is off by 1.3 times the plain error; the factors alone leave it room."""
SUMMED_ULPS = {"float64": 1.0, "float32": 1.0}
"""Ulp added for formats in which sums are kept as they are, times the square root of the number of terms of the longest
sum, since other orders of its terms round differently. (16-bit results are sums in float32, rounded once.)"""
SMALL_ROW = 0.05
"""Share of the median row; a smaller row is measured against it, since rounding alone may double a tiny row."""
ZERO_ROW = 1e-6
"""Share of the median row below which a row should be 0 (such as dQ of a row that sees one key): its content is
rounding of the larger terms that cancel, so it is measured against a typical row."""
TINY = 1e-30
ROUNDED = 8
"""Ulp of the terms that cancel in a row of dQ or dK, against which a smaller row is measured; in float32 these ulp do
not count as an error. Without this a right flash kernel is now and then called wrong
(tests/verifying/test_few_keys.py)."""
ROW_FLOORS = 8
FORWARD_FACTOR = 2.0
BACKWARD_FACTOR = 3.0
LSE_FLOOR, UNCAPPED_ULPS = 1.5e-5, 8
"""Allowed error of an LSE, and ulp of float32 of a logit before its soft cap."""
SLACK = 4
"""Multiple of the allowed error between two results of one call: both may be right at twice it; a wrong one is far
off."""
LARGE_ROW, MISSING = 0.25, 0.5
"""A row of at least this share of a typical one that is off by half of itself is another row, however coarse the dtype
is: rounding that differs from call to call does not do that."""


class Limits(NamedTuple):
    """Allowed errors in each norm, as shares that hold for other inputs of the same kind too."""

    relative: float
    largest: float
    """Allowed error of one element, as a share of the largest one."""
    row: float

    def widened(self, factor: float) -> Limits:
        """Return limits multiplied by a factor."""
        return Limits(*(factor * limit for limit in self))

    @staticmethod
    def of_rounding(dtype: str) -> Limits:
        """Return the limits of gradients if nothing was compared, as if the plain ones were exact."""
        floor = EPS[dtype] * FLOOR_ULPS[dtype]
        return Limits(EPS[dtype], floor, ROW_FLOORS * floor).widened(BACKWARD_FACTOR)


class Compared(NamedTuple):
    """The comparison of a result with the truth, over all compared heads. `fault` is empty if it is right."""

    error: float
    allowed: float
    max_abs: float
    fault: str
    first_row: int | None = None
    """Flat index of the first wrong row among all that were compared."""
    bad: np.ndarray | None = None
    """Marks of the wrong rows, flat."""
    limits: Limits | None = None
    """Allowed errors of a right result."""

    def worse(self, other: Compared | None) -> Compared:
        """Return the comparison with the larger error and the wider limits of both; both are right."""
        if other is None or other.limits is None or self.limits is None:
            return self
        limits = Limits(*(max(pair) for pair in zip(self.limits, other.limits)))
        return (self if self.error > other.error else other)._replace(limits=limits)


class _Norms(NamedTuple):
    relative: float
    max_abs: float
    worst_row: float
    rows: np.ndarray
    total: float
    """Norm of all right rows."""


def relative_error(got: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """Return the relative Frobenius norm of the difference of arrays [..., rows, width]."""
    return _norms(got, exact).relative


def _norms(
    got: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    least: np.ndarray | float = 0.0,
    expected: float = 0.0,
    dtype: str = "",
) -> _Norms:
    """Return norms over arrays [..., rows, width]; `least` is what rounding may leave in each row.

    A row that should be 0 is measured against a typical row, and the whole against no less than `expected`.
    """
    differences = [g - e for g, e in zip(got, exact)]
    size, off = (np.concatenate([_row_norms(x) for x in arrays]) for arrays in (exact, differences))
    rows = row_errors(off, size, least, dtype)
    total = max(float(np.linalg.norm(size)), expected)
    relative = float(np.linalg.norm(off)) / (total if total > 0 else 1.0)
    return _Norms(relative, max(float(np.abs(x).max()) for x in differences), float(rows.max()), rows, total)


def typical_row(size: np.ndarray) -> float:
    """Return the median of the rows that are not 0."""
    return float(np.median(size[size > 0])) if np.any(size > 0) else 1.0


def row_errors(
    off: np.ndarray, size: np.ndarray, least: np.ndarray | float, dtype: str, typical: float | None = None
) -> np.ndarray:
    """Return the error of each row as a share of its size, or of `least`, what rounding may leave of terms that cancel,
    if that is more.

    Small rows are measured against a typical one: that of the right rows, whose norms are `size`, or the given one. If
    sums are kept in the dtype itself, an error below `least` does not count.
    """
    typical = typical_row(size) if typical is None else typical
    scales = np.where(size < ZERO_ROW * typical, typical, np.maximum(size, SMALL_ROW * typical))
    uncounted = least if dtype in SUMMED_ULPS else 0.0
    return np.maximum(off - uncounted, 0.0) / np.maximum(scales, least)


def row_limits(size: np.ndarray, limit: float, typical: float) -> np.ndarray:
    """Return the allowed error of each row: no large one may be another row, unless any error is allowed."""
    large = (size >= LARGE_ROW * typical) & math.isfinite(limit)
    return np.where(large, min(limit, MISSING), limit)


def _row_norms(array: np.ndarray) -> np.ndarray:
    rows = array.reshape(-1, array.shape[-1])
    return np.sqrt(np.einsum("ij,ij->i", rows, rows))


def rounded_terms(cancelling: np.ndarray, dtype: str, width: int) -> np.ndarray:
    """Return what rounding may leave of cancelling terms of these sizes.

    Sums over a row of `width` elements are kept in the dtype itself, or in a wider one.
    """
    return ROUNDED * EPS[dtype] * (width**0.5 if dtype in SUMMED_ULPS else 1.0) * cancelling


def compare(
    what: str,
    got: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    plain: Sequence[np.ndarray],
    dtype: str,
    factor: float,
    declared: float | None = None,
    cancelling: Sequence[np.ndarray] | None = None,
    summed: int = 0,
    typical: float = 0.0,
) -> Compared:
    """Compare arrays [..., rows, width] of all heads with the exact ones, by the errors of the plain ones.

    `declared` is the error that an approximate implementation declares; `cancelling` [..., rows], the size of the terms
    that cancel in each row; `summed`, the number of terms of the longest sum; `typical`, the size that an element
    usually has at least, since few elements may all be near 0 by chance.
    """
    bad = np.concatenate([(~np.isfinite(g) & np.isfinite(e)).any(axis=-1).ravel() for g, e in zip(got, exact)])
    if bad.any():
        fault = f"{what}: {np.count_nonzero(bad)} rows hold NaN or infinite values"
        return Compared(float("inf"), 0.0, float("inf"), fault, int(np.argmax(bad)), bad)
    cancelled = np.zeros(1) if cancelling is None else np.concatenate([x.ravel() for x in cancelling])
    least = rounded_terms(cancelled, dtype, exact[0].shape[-1])
    own = float(np.linalg.norm([np.linalg.norm(x) for x in exact]))
    expected = typical * sum(x.size for x in exact) ** 0.5
    if own < ZERO_ROW * np.linalg.norm(cancelled):  # it should be 0: its content is rounding of these terms
        expected = float(np.linalg.norm(cancelled))
    mine, yardstick = (_norms(x, exact, least, expected, dtype) for x in (got, plain))
    more = SUMMED_ULPS.get(dtype, 0.0) * summed**0.5
    floor = EPS[dtype] * (FLOOR_ULPS[dtype] + more)
    largest = max(typical, *(float(np.abs(e).max()) for e in exact))
    if declared is not None:
        over = f"{what}: error {mine.relative:.2e} is more than the declared {declared:.2e}"
        limits = Limits(declared, float("inf"), float("inf"))
        return Compared(mine.relative, declared, mine.max_abs, "" if mine.relative <= declared else over, limits=limits)
    # Rounding of terms that cancel is allowed in addition, since their exact sum may be 0.
    terms = float(np.linalg.norm(least)) / (mine.total or 1.0)
    allowed = factor * yardstick.relative + EPS[dtype] * (WHOLE_FLOOR_ULPS[dtype] + more) + terms
    norms = {
        "relative": (mine.relative, allowed),
        "largest": (mine.max_abs, factor * yardstick.max_abs + floor * largest + float(least.max())),
        "worst row's": (mine.worst_row, factor * yardstick.worst_row + ROW_FLOORS * floor),
    }
    row_limit = norms["worst row's"][1]
    unwidened = row_limit if cancelling is None else factor * _norms(plain, exact).worst_row + ROW_FLOORS * floor
    for name, (have, limit) in norms.items():
        if not have <= limit:
            wrong = mine.rows > row_limit
            times = f"{have / limit:.1f} x the {name} error allowed" if limit else f"no {name} error is allowed"
            fault = f"{what}: {times} ({have:.2e} against {limit:.2e})"
            first = int(np.argmax(wrong if wrong.any() else mine.rows))
            return Compared(mine.relative, allowed, mine.max_abs, fault, first, wrong)
    # As shares of the result itself, whatever it was measured against here.
    relative = allowed * mine.total / max(own, TINY * mine.total) if mine.total else allowed
    limits = Limits(relative, norms["largest"][1] / (largest or 1.0), unwidened)
    return Compared(mine.relative, allowed, mine.max_abs, "", limits=limits)


def compare_large_lse(
    got: np.ndarray, exact: np.ndarray, plain: np.ndarray, sizes: np.ndarray, dtype: str, softcap: float = math.inf
) -> Compared:
    """Compare the LSE of rows whose logits may be large, as a share of the largest logit's size (`sizes`, at least 1,
    and at most the soft cap).

    A kernel may round logits as the plain implementation does, and in float32 before a soft cap makes them smaller.
    -inf is required exactly in rows that see no key.
    """
    seen = np.isfinite(exact)
    if not np.array_equal(seen, np.isfinite(got)) or not np.all(got[~seen] == -np.inf):
        fault = "lse: not finite, or not -inf exactly on the rows that see no key"
        return Compared(float("inf"), 0.0, float("inf"), fault)
    size = np.maximum(np.minimum(sizes, softcap), np.abs(exact))  # a bias is part of it, and of no logit
    scale, rounded = np.maximum(size[seen], 1.0), UNCAPPED_ULPS * EPS["float32"] * sizes[seen]
    off, usual = (
        float((np.maximum(np.abs(x[seen] - exact[seen]) - rounded, 0.0) / scale).max(initial=0.0)) for x in (got, plain)
    )
    usual = usual if np.isfinite(usual) else 0.0
    allowed = FORWARD_FACTOR * usual + LSE_FLOOR + EPS[dtype]
    fault = "" if off <= allowed else f"lse: off by {off:.2e} of the largest logit, {allowed:.2e} allowed"
    return Compared(off, allowed, float(np.abs(got[seen] - exact[seen]).max(initial=0.0)), fault)


def compare_lse(got: Sequence[np.ndarray], exact: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> Compared:
    """Compare LSE [g, rows] absolutely; -inf is required exactly in rows that see no key."""
    mine, truth, yardstick = (np.concatenate([x.ravel() for x in arrays]) for arrays in (got, exact, plain))
    seen = np.isfinite(truth)
    if not np.array_equal(seen, np.isfinite(mine)) or not np.all(mine[~seen] == -np.inf):
        return Compared(float("inf"), 0.0, float("inf"), "lse: not -inf exactly on the rows that see no key")
    mine, truth, yardstick = mine[seen], truth[seen], yardstick[seen]
    error, usual, size = (float(np.abs(x).max(initial=0.0)) for x in (mine - truth, yardstick - truth, truth))
    allowed = FORWARD_FACTOR * usual + LSE_FLOOR * (1 + size)
    fault = "" if error <= allowed else f"lse: off by {error:.2e}, {allowed:.2e} allowed"
    return Compared(error, allowed, error, fault)


SMALL = 1e-3
"""Share of a typical batch row's size; smaller ones are compared with it instead."""
BLOCK_ELEMENTS = 1 << 24


class Apart(NamedTuple):
    """The place at which two results differ, by what share, and the allowed share."""

    place: tuple[int, ...]
    """Index of a row, or of a whole batch row."""
    share: float
    allowed: float


def spot(differs: Apart, layout: Layout) -> str:
    """Return words for the place in arrays of a layout."""
    if len(differs.place) != 3:
        return f"part {', '.join(str(n) for n in differs.place)}"
    batch, token, head = differs.place if layout == "bshd" else (differs.place[0], *differs.place[:0:-1])
    return f"batch {batch}, head {head}, row {token}"


def apart(framework: Framework, got: Array, good: Array, limits: Limits, dtype: str) -> Apart | None:
    """Return where `got` differs from `good` [..., width]; None if their rows, elements and batch rows all agree."""
    if good.ndim < 2:
        got, good = got.reshape(1, -1), good.reshape(1, -1)
    size, off, largest, (most, place) = _norms_of_rows(
        framework, got, good, "float64" if dtype == "float64" else "float32"
    )
    limits = limits.widened(SLACK)
    typical = typical_row(size)
    if differs := first_over(row_errors(off, size, 0.0, dtype, typical), row_limits(size, limits.row, typical)):
        return differs
    share = most / largest if largest else math.inf if most else 0.0
    if not share <= limits.largest:
        return Apart(place, share, limits.largest)
    # Batch rows as a whole; an array without batch, tokens and heads counts as one.
    count = size.shape[0] if size.ndim == 3 else 1
    size, off = (np.linalg.norm(norms.reshape(count, -1), axis=1) for norms in (size, off))
    size = np.maximum(size, SMALL * np.median(size))
    with np.errstate(divide="ignore", invalid="ignore"):
        return first_over(np.where(off == 0, 0.0, off / size), limits.relative)


def _norms_of_rows(
    framework: Framework, got: Array, good: Array, wide: str
) -> tuple[np.ndarray, np.ndarray, float, tuple[float, tuple[int, ...]]]:
    """Return the norms of the right rows and of their differences, the largest element, and the largest difference of
    one with the index of its row."""
    shape = tuple(good.shape)
    size, off = np.zeros(shape[:-1]), np.zeros(shape[:-1])
    largest, worst = 0.0, (0.0, (0,) * (len(shape) - 1))
    xp = array_api_compat.array_namespace(good)
    for block in _blocks(shape):
        right = framework.cast(good[block], wide)
        difference = framework.cast(got[block], wide) - right
        size[block], off[block] = (
            np.sqrt(framework.numpy(xp.sum(array * array, axis=-1)).astype(np.float64)) for array in (right, difference)
        )
        largest = max(largest, float(framework.numpy(xp.max(xp.abs(right)))))
        most = float(framework.numpy(xp.max(xp.abs(difference))))
        if not most <= worst[0]:
            corner = np.unravel_index(int(np.argmax(off[block])), off[block].shape)
            start = (*(part.start for part in block), *(0 for _ in range(len(corner) - len(block))))
            worst = most, tuple(int(n) + first for n, first in zip(corner, start))
    return size, off, largest, worst


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the first axis, and of the second if one entry of the first is too large."""
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


def first_over(share: np.ndarray, allowed: np.ndarray | float) -> Apart | None:
    """Return the first place at which a share exceeds the allowed one or is NaN; None if there is no such place."""
    over = ~(share <= allowed)
    if not over.any():
        return None
    place = np.unravel_index(int(np.argmax(over)), over.shape)
    return Apart(tuple(int(n) for n in place), float(share[place]), float(np.broadcast_to(allowed, share.shape)[place]))
