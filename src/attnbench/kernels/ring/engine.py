"""One rank's part of ring attention, forward and backward, over any transport and any work.

Results are merged and gradients summed in float32 (float64 for float64). K and V of the next step are on their way
while this step is computed; sums of dK and dV follow one step behind, hidden by the computation of the next. A
transport posts messages and returns at once; the computation then runs until what arrives is needed. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnbench.frameworks.torch.programs import synchronize
from attnbench.impls.partial.torch_passes import nothing_yet
from attnbench.kernels.dilated.torch_engines import mixed
from attnbench.kernels.ring.schedule import RingProblem
from attnbench.kernels.ring.work import Grads, Pair, RankWork


class Spans:
    """Sums of wall time by kind. Timing waits for the device at both ends; with device None nothing is timed."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self.ns = {"compute": 0, "waiting": 0}

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the time of the `with` block to its kind."""
        if self._device is None:
            yield
            return
        synchronize(self._device)
        start = perf_counter_ns()
        try:
            yield
        finally:
            synchronize(self._device)
            self.ns[kind] += perf_counter_ns() - start


Arrival = Callable[[], Pair]
"""Function that blocks until the pair has arrived."""


class GroupTransport:
    """Links of one rank to its neighbours: messages of torch.distributed, all of a step posted together."""

    def __init__(self, group: Any) -> None:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        around = [(rank + 1) % world, (rank - 1) % world]
        self._group = group
        self._next, self._before = around if group is None else [dist.get_global_rank(group, rank) for rank in around]

    def keys(self, pair: Pair, coming: int, length: int) -> Arrival:
        """Send K and V on; return the arrival of those of rank `coming`, which has `length` tokens."""
        sent = [array.contiguous() for array in pair]
        first, second = (array.new_empty(array.shape[0], length, *array.shape[2:]) for array in pair)
        # A rank without tokens sends nothing, and its neighbour knows it.
        posts = [dist.P2POp(dist.isend, array, self._next, self._group) for array in sent if array.numel()]
        posts += [dist.P2POp(dist.irecv, array, self._before, self._group) for array in (first, second) if length]
        works = dist.batch_isend_irecv(posts) if posts else []

        def arrive() -> tuple[Tensor, Tensor]:
            for work in works:
                work.wait()
            sent.clear()
            return first, second

        return arrive

    gradients = keys
    """Method that sends the sums of dK and dV on and returns the arrival of those for `length` other tokens."""


def transport_of(problem: RingProblem, group: Any) -> Any:
    """Return the transport over a process group, or None for one rank, which never sends."""
    return GroupTransport(group) if problem.world > 1 else None


class VirtualTransport:
    """Links between ranks that one process computes in turn: arrivals are copies from the rank that holds them.

    A rank thereby takes the memory that it would take on a device of its own; the time of a link is not modelled.
    """

    def __init__(self, pairs: Sequence[Pair], sums: list[Pair | None] | None = None) -> None:
        self._pairs, self._sums = pairs, sums

    def keys(self, pair: Pair, coming: int, length: int) -> Arrival:
        """Return the arrival of copies of K and V of rank `coming`."""
        k, v = self._pairs[coming]
        copies = k.clone(), v.clone()
        return lambda: copies

    def gradients(self, pair: Pair, owner: int, length: int) -> Arrival:
        """Add the pair to `sums`, if given; return zeros as the sums that arrive."""
        if self._sums is not None:
            so_far = self._sums[owner]
            self._sums[owner] = pair if so_far is None else (so_far[0] + pair[0], so_far[1] + pair[1])
        first, second = (array.new_zeros(array.shape[0], length, *array.shape[2:]) for array in pair)
        return lambda: (first, second)


Transport = GroupTransport | VirtualTransport


class RingEngine:
    """Forward and backward pass of one rank. Shards are bshd; the LSE is [b, h, tokens]."""

    def __init__(self, problem: RingProblem, rank: int, work: RankWork) -> None:
        self.problem, self.rank, self.work = problem, rank, work
        self._lengths = problem.kv_sizes()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transport: Transport, spans: Spans | None = None
    ) -> tuple[Tensor, ...]:
        """Return (out, lse) of the rank's queries over all keys of the ring; then each channel's output if several."""
        spans, pair = spans or Spans(None), (k, v)
        sums = [nothing_yet((*q.shape[:3], v.shape[-1]), q.dtype, q.device) for _ in range(self.work.channels)]
        for turn in range(self.problem.world):
            coming = self._post_keys(turn, pair, transport)
            with spans.timed("compute"):
                self.work.attend(turn, q, pair, sums)
            if coming is not None:
                with spans.timed("waiting"):
                    pair = coming()
        out, lse = mixed(sums)
        own = [channel.to(q.dtype) for channel, _ in sums] if len(sums) > 1 else []
        return out.to(q.dtype), lse, *own

    def backward(
        self, inputs: Sequence[Tensor], results: Sequence[Tensor], dout: Tensor, transport: Transport,
        spans: Spans | None = None,
    ) -> Grads:  # fmt: skip
        """Return (dq, dk, dv) of the rank's own tokens; `inputs` are q, k, v, and `results` those of `forward`."""
        (q, k, v), (out, lse, *own) = inputs, results
        spans, pair, coming_sums = spans or Spans(None), (k, v), None
        whole = tuple(own) or (out,), lse, dout
        dq, pair_sums = _wide_zeros(q), (k, v)
        for turn in range(self.problem.world):
            coming = self._post_keys(turn, pair, transport)
            with spans.timed("compute"):
                pair_sums = _wide_zeros(pair[0]), _wide_zeros(pair[1])
                self.work.differentiate(turn, q, pair, whole, (dq, *pair_sums))
            if coming_sums is not None:
                with spans.timed("waiting"):
                    arrived = coming_sums()
                with spans.timed("compute"):
                    pair_sums = pair_sums[0].add_(arrived[0]), pair_sums[1].add_(arrived[1])
            coming_sums = self._post_sums(turn, pair_sums, transport)
            if coming is not None:
                with spans.timed("waiting"):
                    pair = coming()
        if coming_sums is not None:
            with spans.timed("waiting"):
                pair_sums = coming_sums()
        return dq.to(q.dtype), pair_sums[0].to(k.dtype), pair_sums[1].to(v.dtype)

    def under_whole(self, transport: Transport) -> Callable[..., Grads]:
        """Return a backward `(q, k, v, out, lse, dout) -> (dq, dk, dv)` with one output and LSE for all channels."""

        def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Grads:
            own = (out,) * self.work.channels if self.work.channels > 1 else ()
            return self.backward((q, k, v), (out, lse, *own), dout, transport)

        return backward

    def rotate(self, k: Tensor, v: Tensor, transport: Transport, gradients: bool) -> None:
        """Run all the communication of a pass and nothing else, to time it by itself."""
        pair, pair_sums = (k, v), (_wide_zeros(k), _wide_zeros(v))
        for turn in range(self.problem.world):
            coming = self._post_keys(turn, pair, transport)
            coming_sums = self._post_sums(turn, pair_sums, transport) if gradients else None
            if coming is not None:
                pair = coming()
            if coming_sums is not None:
                pair_sums = coming_sums()

    def _source(self, turn: int) -> int:
        """Return the rank whose keys are here at a turn; after the last turn it is this rank again."""
        return (self.rank - turn) % self.problem.world

    def _post_keys(self, turn: int, pair: Pair, transport: Transport) -> Arrival | None:
        if turn + 1 == self.problem.world:
            return None
        source = self._source(turn + 1)
        return transport.keys(pair, source, self._lengths[source])

    def _post_sums(self, turn: int, pair_sums: Pair, transport: Transport) -> Arrival | None:
        if self.problem.world == 1:
            return None
        return transport.gradients(pair_sums, self._source(turn), self._lengths[self._source(turn + 1)])


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
