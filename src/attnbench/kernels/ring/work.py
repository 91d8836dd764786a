"""What a rank computes with the keys that are here: a dense tile after the other, merged into its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attnbench.impls.partial.torch_passes import merge_
from attnbench.kernels.ring.kernels import Kernels
from attnbench.kernels.ring.schedule import Problem, Step, schedule
from attnbench.kernels.ring.tiles import Tile
from attnbench.kernels.ring.transport import Pair

if TYPE_CHECKING:
    import torch

Sums = list[tuple["torch.Tensor", "torch.Tensor"]]
"""(out, lse) so far: one pair, or one for each branch that is mixed at the end."""
Whole = tuple[tuple["torch.Tensor", ...], "torch.Tensor", "torch.Tensor"]
"""Output of each channel, lse, dout."""
Grads = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""dq, dk, dv so far."""


class Work(Protocol):
    """One rank's part of a problem, turn by turn."""

    kernels: Kernels
    channels: int
    """Results that are kept apart until the end, and whose own outputs the backward pass wants; 1: just one."""

    def prepare(self, device: torch.device) -> None:
        """Choose every kernel: a refusal must come before the first message to another rank."""
        ...

    def attend(self, turn: int, q: torch.Tensor, pair: Pair, sums: Sums) -> None:
        """Merge what this turn's keys add."""
        ...

    def differentiate(self, turn: int, q: torch.Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        """Add this turn's gradients."""
        ...


class DenseWork:
    """Causal or full attention; keys from position `limit` on are hidden."""

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
            rows = slice(tile.row, tile.row_end)
            part = self.kernels.at(tile)[0](q[:, rows], *_keys(pair, tile))
            merge_(out[:, rows], lse[:, :, rows], *part)

    def differentiate(self, turn: int, q: torch.Tensor, pair: Pair, whole: Whole, grads: Grads) -> None:
        (out,), lse, dout = whole
        for tile in self._steps[turn].tiles:
            rows, columns = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
            kernel = self.kernels.at(tile)[1]
            found = kernel(q[:, rows], *_keys(pair, tile), out[:, rows], lse[:, :, rows], dout[:, rows])
            for total, part in zip((grads[0][:, rows], grads[1][:, columns], grads[2][:, columns]), found):
                total.add_(part)


def _keys(pair: Pair, tile: Tile) -> Pair:
    columns = slice(tile.key, tile.key_end)
    return pair[0][:, columns], pair[1][:, columns]
