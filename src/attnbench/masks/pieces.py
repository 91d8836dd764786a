"""A mask cut into a few calls, each over a run of keys and without a mask, or causal: nothing T x S is left."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from attnbench.masks.base import Mask, MaskShape
from attnbench.masks.combine import both
from attnbench.masks.data import freeze
from attnbench.masks.keyed import Lengths
from attnbench.masks.positional import Causal, Full

Shape = Literal["full", "causal"]


class Piece(NamedTuple):
    """Queries start:stop see the keys first:last, up to `mask`, whose queries and keys are those of the piece."""

    start: int
    stop: int
    first: int
    last: int
    mask: Mask


def pieces(mask: Mask, shape: MaskShape, most: int) -> list[Piece] | str:
    """At most so many, in the order of the queries, or why there are none. Key lengths stay a part of each piece."""
    lengths = [part for part in mask.split() if isinstance(part, Lengths)]
    rest: Mask = Full()
    for part in mask.split():
        rest = rest if isinstance(part, Lengths) else both(rest, part)
    interval = None if rest.weighted else rest.interval(shape)
    if interval is None:
        return f"takes masks by which a query sees one run of keys, which {rest.id} does not say"
    low, high = (np.broadcast_to(np.clip(edge, 0, shape.kv_len), (len(edge), shape.q_len)) for edge in interval)
    if (low != low[:1]).any() or (high != high[:1]).any():
        return "takes masks whose batch rows are alike, but for key lengths"
    low, high = low[0], high[0]
    if (high <= low).any():
        return "takes no mask with rows that see no key"
    cut = _runs(low, high, most, growing=False) or _runs(low, high, most, growing=True)
    if cut is None:
        return f"takes masks of at most {most} blocks of queries that see the same keys, or one key more each"
    return [
        Piece(start, stop, int(low[start]), int(high[stop - 1]), _within(kind, low[start], high[stop - 1], lengths))
        for start, stop, kind in cut
    ]


def _runs(low: np.ndarray, high: np.ndarray, most: int, growing: bool) -> list[tuple[int, int, Shape]] | None:
    """Rows that see the same keys, and with `growing` also rows of which each sees one key more than the last."""
    ends: dict[Shape, np.ndarray] = {"full": np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1}
    if growing:
        ends["causal"] = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 1)) + 1
    found: list[tuple[int, int, Shape]] = []
    start = 0
    while start < len(low):
        if len(found) == most:
            return None
        stops: dict[Shape, int] = {
            kind: int(after[np.searchsorted(after, start, side="right")]) if (after > start).any() else len(low)
            for kind, after in ends.items()
        }
        kind = max(stops, key=lambda one: stops[one])
        found.append((start, stops[kind], kind))
        start = stops[kind]
    return found


def _within(kind: Shape, first: int, last: int, lengths: list[Lengths]) -> Mask:
    """What is left to say of a piece: its growth, and the key lengths that end inside it."""
    mask: Mask = Causal() if kind == "causal" else Full()
    for part in lengths:
        inside = np.clip(part.kv_lengths.array - first, 0, last - first)
        if (inside < last - first).any():
            mask = both(mask, Lengths(freeze(inside)))
    return mask
