"""The location of an error in a wrong result, and a hint at its cause, for the author of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

SHOWN = 4
"""Number of values of a row, ranges of rows, and heads that are shown."""
ALIKE = 0.02
"""Relative difference up to which two rows count as the same row."""


class RowPlaces(NamedTuple):
    """The places of compared arrays [members, rows, width], one per entry of `heads` (batch, key/value head)."""

    heads: Sequence[tuple[int, int]]
    rows: np.ndarray
    members: int
    """Query heads of a key/value head; 1 for gradients of K and V."""

    def head(self, flat: int) -> tuple[int, int]:
        """Return (batch, head) of a row by its flat index."""
        which, rest = divmod(flat, self.members * len(self.rows))
        batch, index = self.heads[which]
        return batch, index * self.members + rest // len(self.rows)

    def row(self, flat: int) -> int:
        """Return the token of a row by its flat index."""
        return int(self.rows[flat % len(self.rows)])


def describe(
    got: Sequence[np.ndarray], exact: Sequence[np.ndarray], bad: np.ndarray, first: int, places: RowPlaces
) -> str:
    """Return several lines about the wrong rows, which `bad` marks among all rows, by flat index."""
    mine, truth = (np.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays]) for arrays in (got, exact))
    wrong = np.flatnonzero(bad) if bad.any() else np.array([first])
    batch, head = places.head(first)
    rows = _ranges(sorted({places.row(int(flat)) for flat in wrong}))
    lines = [
        f"{len(wrong)} of {len(bad)} compared rows are wrong",
        f"heads (batch:head): {_heads(wrong, places)}",
        f"rows: {rows} of {_ranges(sorted(places.rows.tolist()))}",
        f"first at batch {batch}, head {head}, row {places.row(first)}:",
        f"  got      {_values(mine[first])}",
        f"  expected {_values(truth[first])}",
    ]
    hint = _factor(mine[wrong], truth[wrong]) or _stranger(mine[first], truth, first, places)
    return "\n".join([*lines, hint] if hint else lines)


def _heads(wrong: np.ndarray, places: RowPlaces) -> str:
    found = sorted({places.head(int(flat)) for flat in wrong})
    total = len(places.heads) * places.members
    shown = ", ".join(f"{batch}:{head}" for batch, head in found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")
    return f"all {total} compared" if len(found) == total else f"{shown} ({len(found)} of {total} compared)"


def _ranges(numbers: Sequence[int]) -> str:
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    told = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(told[:SHOWN]) + (f", ... ({len(numbers)} rows)" if len(told) > SHOWN else "")


def _values(row: np.ndarray) -> str:
    return " ".join(f"{value: .4g}" for value in row[:SHOWN]) + (" ..." if len(row) > SHOWN else "")


def _factor(mine: np.ndarray, truth: np.ndarray) -> str:
    """Return a hint if every wrong row is the right one times one number; else an empty text."""
    scale = float(np.vdot(truth, truth))
    if not scale or not np.isfinite(mine).all():
        return ""
    factor = float(np.vdot(mine, truth)) / scale
    rest = float(np.linalg.norm(mine - factor * truth)) / scale**0.5
    if rest > ALIKE * abs(factor) or abs(factor) < ALIKE:
        return "it is 0 everywhere there" if not mine.any() else ""
    return f"it is {factor:.4g} x what it should be: a missing or doubled factor?"


def _stranger(row: np.ndarray, truth: np.ndarray, first: int, places: RowPlaces) -> str:
    """Return a hint if a wrong row is right for another head; else an empty text."""
    same_row = range(first % len(places.rows), len(truth), len(places.rows))
    for flat in same_row:
        size = float(np.linalg.norm(truth[flat]))
        if flat != first and size and float(np.linalg.norm(row - truth[flat])) < ALIKE * size:
            batch, head = places.head(flat)
            return f"it is what batch {batch}, head {head} should give: are heads or groups mixed up?"
    return ""
