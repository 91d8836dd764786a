"""Calls of a visit that are looked at, drawn at random, and what is kept of their outputs until the clock is over.

Of a call with a fresh transform a few rows of one head are copied as soon as its sample is timed. One call of a visit
is held as it is until the visit is over; in a visit that has a call with a known transform it is that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import array_api_compat
import numpy as np

from attnbench.frameworks import Framework
from attnbench.frameworks.base import Watch
from attnbench.spec import Array, Layout, Workload
from attnbench.verifying.input_transforms import CallInputs, Transform

LOOKS = 16
"""Calls of a visit that are looked at, if it has so few samples that several calls of each are."""
ROWS, PAIRS = 64, 1 << 15
"""Rows of a visit that are compared at most, and pairs of a query and a key that they may have together."""
COPIED = ("out", "dq")
"""Outputs whose rows depend on one query each."""


class Box(NamedTuple):
    """Tokens of one key/value head, or of the query heads that share it."""

    batch: int
    head: int
    row: int
    rows: int


class Look(NamedTuple):
    """What was copied of one call: rows of its outputs. `which` is its input set."""

    which: int
    transform: Transform
    box: Box
    parts: Mapping[str, Array]


class Held(NamedTuple):
    """The outputs of one call, and what was copied of them when its sample was timed, if anything."""

    which: int
    transform: Transform
    outputs: Mapping[str, Array]
    look: Look | None


class Boxes:
    """Cuts boxes out of arrays of one layout."""

    def __init__(self, framework: Framework, workload: Workload, layout: Layout) -> None:
        self.framework, self.workload = framework, workload
        self.layout: Layout = layout
        self.token_axis, self.head_axis = (1, 2) if layout == "bshd" else (2, 1)

    def cut(self, array: Array, box: Box, of_keys: bool = False) -> Array:
        """Copy a box of an input or output, in its layout."""
        group = 1 if of_keys else self.workload.group
        heads, tokens = (box.head * group, group), (box.row, box.rows)
        order = (tokens, heads) if self.token_axis == 1 else (heads, tokens)
        starts, sizes = zip((box.batch, 1), *order, (0, array.shape[-1]))
        return self.framework.part(array, starts, sizes)

    def rows(self, array: Array, at: tuple[int, int], rows: np.ndarray, device: str) -> Array:
        """Copy rows, in any order, of the query heads that share a key/value head."""
        box, group = Box(*at, 0, array.shape[self.token_axis]), self.workload.group
        heads = slice(box.head * group, (box.head + 1) * group)
        if self.framework.overwrites:  # then a slice costs nothing
            array = array[box.batch : box.batch + 1]
            head = array[:, :, heads] if self.head_axis == 2 else array[:, heads]
        else:
            head = self.cut(array, box)
        index = self.framework.namespace(device).asarray(rows)
        return array_api_compat.array_namespace(head).take(head, index, axis=self.token_axis)

    def row_factors(self, each: Sequence[np.ndarray], at: tuple[int, int], rows: int, of_keys: bool = False) -> Array:
        """Cut the factors of a head out of those of several calls, and repeat each for so many rows of its call."""
        group = 1 if of_keys else self.workload.group
        heads = slice(at[1] * group, (at[1] + 1) * group)
        cut = [one[at[0], :, heads] if self.head_axis == 2 else one[at[0], heads] for one in each]
        return np.repeat(np.concatenate(cut, axis=self.token_axis - 1), rows, axis=self.token_axis - 1)[None]

    def host(self, box: Array) -> np.ndarray:
        """Return [heads, tokens, width] in float64."""
        one = box if isinstance(box, np.ndarray) else self.framework.numpy(box)
        return (one[0].transpose(1, 0, 2) if self.head_axis == 2 else one[0]).astype(np.float64)


def most_rows(workload: Workload) -> int:
    """Rows that may be compared after each visit."""
    return max(1, min(ROWS, PAIRS // (workload.kv_len * workload.group)))


class TimedCalls(Watch):
    """Looks at the calls of one visit."""

    def __init__(
        self,
        boxes: Boxes,
        names: Sequence[str],
        inputs: CallInputs,
        samples: int,
        several: bool,
        rng: np.random.Generator,
    ) -> None:
        self._boxes, self._names, self._inputs, self._rng, workload = boxes, names, inputs, rng, boxes.workload
        self.at = int(rng.integers(workload.batch)), int(rng.integers(workload.kv_heads))
        """Batch row and key/value head whose rows are compared."""
        self._per_sample = max(1, LOOKS // samples) if several else 1
        looks = samples * min(self._per_sample, max(1, len(inputs) // samples))
        self._rows = max(1, min(most_rows(workload) // looks, workload.q_len))
        self._hold_at, self._seen = int(rng.integers(looks)), 0
        self._starts = rng.integers(workload.q_len - self._rows + 1, size=looks).tolist()
        self.looks: list[Look] = []
        self.held: Held | None = None

    def pick(self, calls: int) -> Sequence[int]:
        if calls <= self._per_sample:
            return range(calls)
        return sorted(self._rng.choice(calls, self._per_sample, replace=False).tolist())

    def look(self, call: int, output: tuple[Array, ...]) -> None:
        which, transform = self._inputs.used[call]
        outputs, look = dict(zip(self._names, output)), None
        if not transform.known:
            box = Box(*self.at, self._starts[self._seen % len(self._starts)], self._rows)
            parts = {name: self._boxes.cut(array, box) for name, array in outputs.items() if name in COPIED}
            look = Look(which, transform, box, parts)
            self.looks.append(look)
        if transform.known if self._inputs.mixed else self._seen == self._hold_at:
            self.held = Held(which, transform, outputs, look)
        self._seen += 1
