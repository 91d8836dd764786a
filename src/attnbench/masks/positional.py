"""Masks that depend on positions alone: full, causal, window, prefix, LongNet's dilated pattern, and ALiBi's bias."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import gcd, lcm
from typing import Any, Literal

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.base import (
    LARGEST_SIZE,
    Align,
    FrozenArray,
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
    """All pairs."""

    @property
    def id(self) -> str:
        return "full"

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        return lambda b, h, q, kv: (q >= 0) & (kv >= 0)

    def interval(self, shape: MaskShape) -> Interval:
        return np.zeros((1, shape.q_len), np.int64), np.full((1, shape.q_len), shape.kv_len)


class Causal(Mask, frozen=True, tag="causal"):
    """Keys up to the query's position, j <= i after alignment."""

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
    """Keys near the query, i - left <= j <= i + right after alignment; None means no bound on that side."""

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
    """The first n keys, and keys up to the query's position after alignment."""

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


class Dilated(Mask, frozen=True, tag="dilated"):
    """LongNet's pattern. In branch k tokens are cut into segments of w; head h keeps the positions offset, offset + r,
    ... of each segment, which see each other."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offset: Literal["mod", "group"] = "mod"

    def __post_init__(self) -> None:
        if len(self.segment_lengths) != len(self.dilation_rates) or not self.segment_lengths:
            raise InvalidWorkload("dilated needs as many dilation rates as segment lengths, and at least one of each.")
        if min(self.segment_lengths) < 1 or min(self.dilation_rates) < 1:
            raise InvalidWorkload("dilated segment lengths and rates must be at least 1.")
        if self.offset not in ("mod", "group"):
            raise InvalidWorkload(f'offset is "mod" (the paper) or "group" (torchscale), not "{self.offset}".')

    @property
    def id(self) -> str:
        branches = "+".join(f"{w}r{r}" for w, r in zip(self.segment_lengths, self.dilation_rates))
        return f"dilated{branches}" + ("" if self.offset == "mod" else "-group")

    @property
    def weighted(self) -> bool:
        return len(self.segment_lengths) > 1

    @property
    def per_head(self) -> bool:
        return max(self.dilation_rates) > 1

    @property
    def per_block(self) -> bool:
        return False

    def check(self, shape: MaskShape) -> None:
        if shape.q_len != shape.kv_len:
            raise InvalidWorkload(f"dilated is self-attention: q_len {shape.q_len} must equal kv_len {shape.kv_len}.")

    def head_offset(self, h: Any, rate: int, heads: int) -> Any:
        """Return the offset of head h (a number or an array) in a branch of this rate."""
        return h % rate if self.offset == "mod" else h // -(-heads // rate)

    def _meets(self, branch: int, heads: int, b: Any, h: Any, q: Any, kv: Any) -> Any:
        w, r = self.segment_lengths[branch], self.dilation_rates[branch]
        offset = self.head_offset(h, r, heads)
        return (q // w == kv // w) & ((q % w) % r == offset) & ((kv % w) % r == offset)

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
            seen = self._meets(0, shape.heads, b, h, q, kv)
            for branch in range(1, len(self.segment_lengths)):
                seen = seen | self._meets(branch, shape.heads, b, h, q, kv)
            return seen

        return visible

    def log_weight(self, shape: MaskShape, namespace: Namespace) -> Predicate | None:
        if not self.weighted:
            return None

        def weight(b: Any, h: Any, q: Any, kv: Any) -> Any:
            count = sum(self._meets(n, shape.heads, b, h, q, kv) * 1 for n in range(len(self.segment_lengths)))
            return namespace.log(namespace.where(count > 0, count, 1) * 1.0)

        return weight

    def keys_of_heads(self, shape: MaskShape) -> np.ndarray:
        """Return the positions that a head keeps in some branch: each of them sees itself."""
        h, kv = np.arange(shape.heads if self.per_head else 1)[None, :, None], np.arange(shape.kv_len)
        kept = np.zeros((1, h.size, shape.kv_len), bool)
        for branch in range(len(self.segment_lengths)):
            kept |= self._meets(branch, shape.heads, 0, h, kv, kv)
        return kept

    def _count_in(self, shape: MaskShape, low: np.ndarray, high: np.ndarray) -> int | None:
        if low.any():
            return None
        one_row = shape._replace(batch=shape.batch // len(high))
        return sum(self.count(one_row, below) for below in high)

    def count(self, shape: MaskShape, below: np.ndarray) -> int:
        """Return the number of visible pairs with j < below[i], by inclusion and exclusion over branches.

        The keys of a row form a progression. No key lies beyond the least common multiple of the segments, so rows that
        far apart have equal counts if `below` is equal: one such stretch and the rest are counted.
        """
        period = lcm(*self.segment_lengths)
        whole = shape.q_len // period
        if whole > 1:
            stretches = below[: whole * period].reshape(whole, period) - np.arange(whole)[:, None] * period
            stretches = np.clip(stretches, 0, period)
            if (stretches == stretches[0]).all():
                one = shape._replace(q_len=period, kv_len=period)
                rest = shape._replace(q_len=shape.q_len - whole * period, kv_len=shape.kv_len - whole * period)
                later = below[whole * period :] - whole * period
                return whole * self._count(one, stretches[0]) + self._count(rest, later)
        return self._count(shape, below)

    def _count(self, shape: MaskShape, below: np.ndarray) -> int:
        total, every = 0, range(len(self.segment_lengths))
        for size in range(1, len(every) + 1):
            for branches in combinations(sorted(every, key=lambda n: -self.dilation_rates[n]), size):
                heads = Counter(
                    tuple(self.head_offset(head, self.dilation_rates[n], shape.heads) for n in branches)
                    for head in range(shape.heads)
                )
                met = (self._meeting_in_all(branches, offsets, below) * times for offsets, times in heads.items())
                total += (-1) ** (size + 1) * sum(met)
        return total * shape.batch

    def _meeting_in_all(self, branches: tuple[int, ...], offsets: tuple[int, ...], below: np.ndarray) -> int:
        """Return how many pairs of a head with these offsets meet in all of the branches, the sparsest first."""
        rows = np.arange(len(below))
        low, high, first, step = np.zeros_like(rows), below.astype(np.int64), np.zeros_like(rows), 1
        for branch, offset in zip(branches, offsets):
            w, r = self.segment_lengths[branch], self.dilation_rates[branch]
            common = gcd(step, r)
            residue = (rows // w * w + offset) % r
            alive = ((rows % w) % r == offset) & ((residue - first) % common == 0)
            rows, low, high, first, residue = (column[alive] for column in (rows, low, high, first, residue))
            start = rows // w * w
            low, high = np.maximum(low, start), np.minimum(high, start + w)
            # Chinese remainders: the keys in all branches so far are first, first + step, ...
            reduced = r // common
            inverse = pow(step // common, -1, reduced) if reduced > 1 else 0
            first = first + step * (((residue - first) // common * inverse) % reduced)
            step = step * reduced
            first %= step
        counts = (high - 1 - first) // step - (low - 1 - first) // step
        return int(np.maximum(counts, 0)[high > low].sum())


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the slopes of the ALiBi paper in float32: 2 ** (-8 n / heads) for n = 1 ... heads if that is a power of 2.

    Else those of the next lower power of 2, and of twice as many every other one.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2.0 ** (-4 * n / power) for n in range(1, 2 * (heads - power), 2)]
    return np.asarray(slopes, np.float32)


class Alibi(Mask, frozen=True, tag="alibi"):
    """All pairs, with the log-weight -slopes[h] * |i - j| after alignment."""

    slopes: FrozenArray
    align: Align = "bottom-right"

    def __post_init__(self) -> None:
        check_align(self.align)

    @property
    def id(self) -> str:
        return f"alibi-{self.slopes.digest}" + _suffix(self.align)

    @property
    def title(self) -> str:
        """The name alone for the slopes of the paper, else the id."""
        return "alibi" + _suffix(self.align) if self.is_usual else self.id

    @property
    def is_usual(self) -> bool:
        """Whether the slopes are those of the paper for their number of heads."""
        return np.array_equal(self.slopes.array, alibi_slopes(self.slopes.shape[0]))

    @property
    def weighted(self) -> bool:
        return True

    @property
    def per_head(self) -> bool:
        return True

    def check(self, shape: MaskShape) -> None:
        if self.slopes.shape != (shape.heads,):
            raise InvalidWorkload(f"alibi has {self.slopes.shape[0]} slopes, the workload has {shape.heads} heads.")

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        return lambda b, h, q, kv: (q >= 0) & (kv >= 0)

    def log_weight(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        slopes, offset = namespace.asarray(-self.slopes.array), query_offset(self.align, shape)
        return lambda b, h, q, kv: slopes[h] * abs(q + offset - kv)

    def interval(self, shape: MaskShape) -> Interval:
        return np.zeros((1, shape.q_len), np.int64), np.full((1, shape.q_len), shape.kv_len)
