"""How keys, values and their gradients get from rank to rank: over a process group, or, where ranks are virtual, not.

A transport posts and returns at once; what it returns is waited for after the computation it hides behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]
Arrival = Callable[[], Pair]
"""Blocks until the pair is here."""


class Transport(Protocol):
    """One rank's links to its neighbours."""

    def keys(self, pair: Pair, coming: int, length: int) -> Arrival:
        """Send K and V on; those of rank `coming` arrive, `length` tokens."""
        ...

    def gradients(self, pair: Pair, owner: int, length: int) -> Arrival:
        """Send the sums of dK and dV of rank `owner` on; others arrive, `length` tokens."""
        ...


class GroupTransport:
    """Point-to-point messages of torch.distributed, all of a step posted together."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self._group = group
        self._next, self._before = (_global(group, (rank + step) % world) for step in (1, -1))

    def keys(self, pair: Pair, coming: int, length: int) -> Arrival:
        return self._pass_on(pair, length)

    def gradients(self, pair: Pair, owner: int, length: int) -> Arrival:
        return self._pass_on(pair, length)

    def _pass_on(self, pair: Pair, length: int) -> Arrival:
        import torch.distributed as dist

        sent = [array.contiguous() for array in pair]
        first, second = (array.new_empty(array.shape[0], length, *array.shape[2:]) for array in pair)
        # Ranks that hold no token have nothing to say, and both sides know it.
        posts = [dist.P2POp(dist.isend, array, self._next, self._group) for array in sent if array.numel()]
        posts += [dist.P2POp(dist.irecv, array, self._before, self._group) for array in (first, second) if length]
        works = dist.batch_isend_irecv(posts) if posts else []

        def arrive() -> tuple[torch.Tensor, torch.Tensor]:
            for work in works:
                work.wait()
            sent.clear()
            return first, second

        return arrive


def _global(group: Any, rank: int) -> int:
    import torch.distributed as dist

    return rank if group is None else dist.get_global_rank(group, rank)


class VirtualTransport:
    """Ranks of one process, one after the other: what would arrive is copied from the rank that holds it.

    The memory of a rank is thereby what it would be; the time of a link is not, and nobody claims it.
    """

    def __init__(self, held: Sequence[Pair], sums: list[Pair | None] | None = None) -> None:
        self._held, self._sums = held, sums

    def keys(self, pair: Pair, coming: int, length: int) -> Arrival:
        k, v = self._held[coming]
        copies = k.clone(), v.clone()
        return lambda: copies

    def gradients(self, pair: Pair, owner: int, length: int) -> Arrival:
        """Sums are gathered in `sums` (nowhere without it), and what arrives is a fresh one."""
        if self._sums is not None:
            so_far = self._sums[owner]
            self._sums[owner] = pair if so_far is None else (so_far[0] + pair[0], so_far[1] + pair[1])
        first, second = (array.new_zeros(array.shape[0], length, *array.shape[2:]) for array in pair)
        return lambda: (first, second)
