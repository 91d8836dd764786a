"""One rank's part of ring attention, forward and backward, over any transport and any kernel with a partial form.

Results are merged and gradients summed in float32 (float64 for float64). K and V of the next step are on their way
while this step is computed; sums of dK and dV follow one step behind, hidden by the computation of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnbench.impls.parts.torch_merge import merge_, nothing_yet
from attnbench.impls.ring.kernels import Kernels
from attnbench.impls.ring.schedule import Problem, schedule
from attnbench.impls.ring.spans import Spans, Untimed
from attnbench.impls.ring.tiles import Tile
from attnbench.impls.ring.transport import Pair, Transport

if TYPE_CHECKING:
    import torch


class Engine:
    """What a rank needs to take part: its plan and its kernels. Shards are bshd; LSE is [b, h, tokens]."""

    def __init__(self, problem: Problem, rank: int, kernels: Kernels) -> None:
        self.problem, self.rank, self.kernels = problem, rank, kernels
        self._steps = schedule(problem, rank)
        self._lengths = problem.kv_sizes()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, transport: Transport, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the rank's queries over all keys of the ring."""
        spans, pair = spans or Untimed(), (k, v)
        out, lse = nothing_yet((q.shape[0], q.shape[1], q.shape[2], v.shape[-1]), q.dtype, q.device)
        for turn, step in enumerate(self._steps):
            coming = self._post_keys(turn, pair, transport)
            with spans.timed("compute"):
                for tile in step.tiles:
                    rows, (keys, values) = slice(tile.row, tile.row_end), _keys(pair, tile)
                    part = self.kernels.at(tile)[0](q[:, rows], keys, values)
                    merge_(out[:, rows], lse[:, :, rows], *part)
            if coming is not None:
                with spans.timed("waiting"):
                    pair = coming()
        return out.to(q.dtype), lse

    def backward(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        transport: Transport,
        spans: Spans | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of the rank's own tokens; `inputs` are q, k, v, and out and lse what forward gave."""
        q, k, v = inputs
        spans, pair, sums = spans or Untimed(), (k, v), None
        dq, mine = _wide_zeros(q), (k, v)
        for turn, step in enumerate(self._steps):
            coming = self._post_keys(turn, pair, transport)
            with spans.timed("compute"):
                mine = _wide_zeros(pair[0]), _wide_zeros(pair[1])
                for tile in step.tiles:
                    self._add(tile, q, pair, (out, lse, dout), dq, mine)
            if sums is not None:
                with spans.timed("waiting"):
                    arrived = sums()
                with spans.timed("compute"):
                    mine = mine[0].add_(arrived[0]), mine[1].add_(arrived[1])
            if len(self._steps) > 1:
                sums = transport.gradients(mine, step.source, self._lengths[self._source(turn + 1)])
            if coming is not None:
                with spans.timed("waiting"):
                    pair = coming()
        if sums is not None:
            with spans.timed("waiting"):
                mine = sums()
        return dq.to(q.dtype), mine[0].to(k.dtype), mine[1].to(v.dtype)

    def rotate(self, k: torch.Tensor, v: torch.Tensor, transport: Transport, gradients: bool) -> None:
        """All the communication of a pass and nothing else, to time it by itself."""
        pair, mine = (k, v), (_wide_zeros(k), _wide_zeros(v))
        for turn, step in enumerate(self._steps):
            coming = self._post_keys(turn, pair, transport)
            if gradients and len(self._steps) > 1:
                mine = transport.gradients(mine, step.source, self._lengths[self._source(turn + 1)])()
            if coming is not None:
                pair = coming()

    def _source(self, turn: int) -> int:
        """Whose keys are here at a turn; after the last one, the rank's own come home."""
        return (self.rank - turn) % self.problem.world

    def _post_keys(self, turn: int, pair: Pair, transport: Transport):  # noqa: ANN202
        if turn + 1 == len(self._steps):
            return None
        source = self._steps[turn + 1].source
        return transport.keys(pair, source, self._lengths[source])

    def _add(
        self,
        tile: Tile,
        q: torch.Tensor,
        pair: Pair,
        whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        dq: torch.Tensor,
        sums: Pair,
    ) -> None:
        out, lse, dout = whole
        rows, columns = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
        grads = self.kernels.at(tile)[1](q[:, rows], *_keys(pair, tile), out[:, rows], lse[:, :, rows], dout[:, rows])
        for total, part in zip((dq[:, rows], sums[0][:, columns], sums[1][:, columns]), grads):
            total.add_(part)


def _keys(pair: Pair, tile: Tile) -> Pair:
    columns = slice(tile.key, tile.key_end)
    return pair[0][:, columns], pair[1][:, columns]


def _wide_zeros(array: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.zeros_like(array, dtype=torch.promote_types(array.dtype, torch.float32))
