"""One rank's part of ring attention, forward and backward, over any transport and any work.

Results are merged and gradients summed in float32 (float64 for float64). K and V of the next step are on their way
while this step is computed; sums of dK and dV follow one step behind, hidden by the computation of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attnbench.impls.partial.torch_passes import NEGATIVE_INFINITY, nothing_yet
from attnbench.kernels.ring.schedule import Problem
from attnbench.kernels.ring.spans import Spans, Untimed
from attnbench.kernels.ring.transport import Arrival, Pair, Transport
from attnbench.kernels.ring.work import Sums, Work

if TYPE_CHECKING:
    import torch


class Engine:
    """What a rank needs to take part. Shards are bshd; LSE is [b, h, tokens]."""

    def __init__(self, problem: Problem, rank: int, work: Work) -> None:
        self.problem, self.rank, self.work = problem, rank, work
        self._lengths = problem.kv_sizes()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, transport: Transport, spans: Spans | None = None
    ) -> tuple[torch.Tensor, ...]:
        """(out, lse) of the rank's queries over all keys of the ring, and each channel's own output if several."""
        spans, pair = spans or Untimed(), (k, v)
        sums = [nothing_yet((*q.shape[:3], v.shape[-1]), q.dtype, q.device) for _ in range(self.work.channels)]
        for turn in range(self.problem.world):
            coming = self._post_keys(turn, pair, transport)
            with spans.timed("compute"):
                self.work.attend(turn, q, pair, sums)
            if coming is not None:
                with spans.timed("waiting"):
                    pair = coming()
        out, lse = _mixed(sums)
        own = [one.to(q.dtype) for one, _ in sums] if len(sums) > 1 else []
        return out.to(q.dtype), lse, *own

    def backward(
        self,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        dout: torch.Tensor,
        transport: Transport,
        spans: Spans | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of the rank's own tokens; `inputs` are q, k, v, and `results` what forward gave."""
        (q, k, v), (out, lse, *own) = inputs, results
        spans, pair, sums, whole = spans or Untimed(), (k, v), None, (tuple(own) or (out,), lse, dout)
        dq, mine = _wide_zeros(q), (k, v)
        for turn in range(self.problem.world):
            coming = self._post_keys(turn, pair, transport)
            with spans.timed("compute"):
                mine = _wide_zeros(pair[0]), _wide_zeros(pair[1])
                self.work.differentiate(turn, q, pair, whole, (dq, *mine))
            if sums is not None:
                with spans.timed("waiting"):
                    arrived = sums()
                with spans.timed("compute"):
                    mine = mine[0].add_(arrived[0]), mine[1].add_(arrived[1])
            sums = self._post_sums(turn, mine, transport)
            if coming is not None:
                with spans.timed("waiting"):
                    pair = coming()
        if sums is not None:
            with spans.timed("waiting"):
                mine = sums()
        return dq.to(q.dtype), mine[0].to(k.dtype), mine[1].to(v.dtype)

    def under_whole(self, transport: Transport) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """`(q, k, v, out, lse, dout) -> (dq, dk, dv)` under an output and LSE that all channels share."""

        def backward(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            own = (out,) * self.work.channels if self.work.channels > 1 else ()
            return self.backward((q, k, v), (out, lse, *own), dout, transport)

        return backward

    def rotate(self, k: torch.Tensor, v: torch.Tensor, transport: Transport, gradients: bool) -> None:
        """All the communication of a pass and nothing else, to time it by itself."""
        pair, mine = (k, v), (_wide_zeros(k), _wide_zeros(v))
        for turn in range(self.problem.world):
            coming = self._post_keys(turn, pair, transport)
            sums = self._post_sums(turn, mine, transport) if gradients else None
            if coming is not None:
                pair = coming()
            if sums is not None:
                mine = sums()

    def _source(self, turn: int) -> int:
        """Whose keys are here at a turn; after the last one, the rank's own come home."""
        return (self.rank - turn) % self.problem.world

    def _post_keys(self, turn: int, pair: Pair, transport: Transport) -> Arrival | None:
        if turn + 1 == self.problem.world:
            return None
        source = self._source(turn + 1)
        return transport.keys(pair, source, self._lengths[source])

    def _post_sums(self, turn: int, mine: Pair, transport: Transport) -> Arrival | None:
        if self.problem.world == 1:
            return None
        return transport.gradients(mine, self._source(turn), self._lengths[self._source(turn + 1)])


def _mixed(sums: Sums) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels by their softmax denominators."""
    import torch

    if len(sums) == 1:
        return sums[0]
    lse = torch.logsumexp(torch.stack([one for _, one in sums]), 0)
    base = lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0)
    weights = [torch.exp(one - base).transpose(1, 2).unsqueeze(-1) for _, one in sums]
    out = torch.zeros_like(sums[0][0])
    for (one, _), weight in zip(sums, weights):
        out.addcmul_(one, weight)
    return out, lse


def _wide_zeros(array: torch.Tensor) -> torch.Tensor:
    import torch

    wide = torch.promote_types(array.dtype, torch.float32)
    return torch.zeros(array.shape, dtype=wide, device=array.device)
