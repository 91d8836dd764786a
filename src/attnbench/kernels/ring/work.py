"""The work of one rank in one turn: attend to the keys that are here, tile by tile, and merge into the rank's rows.

`DenseWork` is full or causal attention; `LimitedWork` splits the batch into runs of rows of one key length. The work
for dilated patterns is in `dilated_work`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from attnbench.impls.partial.torch_choice import choose, current
from attnbench.impls.partial.torch_passes import merge_
from attnbench.kernels.ring.schedule import Problem, Step, Tile, schedule
from attnbench.masks import Causal, Full
from attnbench.spec import Partial, Workload

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""Keys and values, or the sums of their gradients."""
Sums = list[tuple["torch.Tensor", "torch.Tensor"]]
"""Merged (out, lse) so far: one pair, or one for each branch that is mixed at the end."""
Whole = tuple[tuple["torch.Tensor", ...], "torch.Tensor", "torch.Tensor"]
"""Output of each channel, LSE, dout."""
Grads = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""Sums of dq, dk, dv so far."""


class Kernels:
    """Kernels for the tiles of one problem on one device, made once for each shape.

    `shape` gives all that a tile does not; `inner` is an implementation's name or "auto".
    """

    def __init__(self, shape: Workload, inner: str, device: torch.device) -> None:
        self._shape, self._inner, self._device = shape, inner, device.type
        self._made: dict[Any, Partial] = {}
        self.used: dict[str, None] = {}
        """Names of the implementations that were chosen, in order."""

    @property
    def batch(self) -> int:
        """Batch rows of the whole problem."""
        return self._shape.batch

    def at(self, tile: Tile) -> Partial:
        """Return (forward, backward) for a tile of all heads; raise Unsupported with every refusal."""
        shape = self._shape
        return self.of((shape.batch, *tile.shape, shape.heads, shape.kv_heads), tile.causal)

    def of(self, sizes: tuple[int, int, int, int, int], causal: bool) -> Partial:
        """Return (forward, backward) for (batch, queries, keys, heads, kv_heads); raise Unsupported if none can."""
        rules = current()
        key = (*sizes, causal, rules)
        if key not in self._made:
            name, self._made[key] = choose(self._inner, self._workload(sizes, causal), self._device, rules)
            self.used[name] = None
        return self._made[key]

    def _workload(self, sizes: tuple[int, int, int, int, int], causal: bool) -> Workload:
        given = dict(zip(("batch", "q_len", "kv_len", "heads", "kv_heads"), sizes))
        mask, scale = Causal() if causal else Full(), self._shape.softmax_scale
        return msgspec.structs.replace(self._shape, **given, mask=mask, scale=scale, source="", tags=())


class Work(Protocol):
    """One rank's part of a problem, turn by turn."""

    kernels: Kernels
    channels: int
    """Number of results that are mixed only at the end and whose own outputs the backward pass needs; usually 1."""

    def prepare(self, device: torch.device) -> None:
        """Choose every kernel now: a refusal must come before the first message to another rank."""
        ...

    def attend(self, turn: int, q: torch.Tensor, pair: Pair, sums: Sums) -> None:
        """Merge the attention to this turn's keys into `sums`."""
        ...

    def differentiate(self, turn: int, q: torch.Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        """Add this turn's gradients to `grads`."""
        ...


class DenseWork:
    """Full or causal attention; keys from position `limit` on are hidden."""

    channels = 1

    def __init__(self, problem: Problem, rank: int, kernels: Kernels, limit: int | None = None) -> None:
        self.kernels = kernels
        self._steps: tuple[Step, ...] = schedule(problem, rank, limit)

    def prepare(self, device: torch.device) -> None:
        for step in self._steps:
            for tile in step.tiles:
                self.kernels.at(tile)

    def attend(self, turn: int, q: torch.Tensor, pair: Pair, sums: Sums) -> None:
        out, lse = sums[0]
        for tile in self._steps[turn].tiles:
            rows, columns = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
            part = self.kernels.at(tile)[0](q[:, rows], pair[0][:, columns], pair[1][:, columns])
            merge_(out[:, rows], lse[:, :, rows], *part)

    def differentiate(self, turn: int, q: torch.Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        (out,), lse, dout = whole
        for tile in self._steps[turn].tiles:
            rows, columns = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
            inputs = q[:, rows], pair[0][:, columns], pair[1][:, columns]
            found = self.kernels.at(tile)[1](*inputs, out[:, rows], lse[:, :, rows], dout[:, rows])
            for total, part in zip((grads[0][:, rows], grads[1][:, columns], grads[2][:, columns]), found):
                total.add_(part)


class LimitedWork:
    """Works of consecutive batch rows with different key lengths. All keys travel; hidden keys are never read."""

    def __init__(self, parts: Sequence[tuple[slice, Work]]) -> None:
        self._parts = parts
        self.kernels, self.channels = parts[0][1].kernels, parts[0][1].channels

    def prepare(self, device: torch.device) -> None:
        for _, work in self._parts:
            work.prepare(device)

    def attend(self, turn: int, q: torch.Tensor, pair: Pair, sums: Sums) -> None:
        for rows, work in self._parts:
            own = [(out[rows], lse[rows]) for out, lse in sums]
            work.attend(turn, q[rows], (pair[0][rows], pair[1][rows]), own)

    def differentiate(self, turn: int, q: torch.Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        outs, lse, dout = whole
        for rows, work in self._parts:
            own = tuple(out[rows] for out in outs), lse[rows], dout[rows]
            dq, dk, dv = (grad[rows] for grad in grads)
            work.differentiate(turn, q[rows], (pair[0][rows], pair[1][rows]), own, (dq, dk, dv))


def rows_of_one_length(lengths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield each run of consecutive batch rows that have one key length, with that length."""
    first = 0
    for length, rows in groupby(lengths):
        last = first + len(list(rows))
        yield slice(first, last), length
        first = last
