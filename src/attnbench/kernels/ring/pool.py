"""Rings of this process: started when first needed, shared by all cells of the same size, replaced when they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring.launcher import RankProcesses, Reply

if TYPE_CHECKING:
    import torch

    from attnbench.kernels.ring.group_ranks import GroupRanks


class RingOfRanks(Protocol):
    """Ranks that can be asked, whoever started them."""

    world: int
    alive: bool

    def ask(
        self, questions: Sequence[tuple[m.Question, tuple[torch.Tensor, ...]]], patience: float = 1.0
    ) -> list[Reply]:
        """One question for each rank, one answer from each."""
        ...


_rings: dict[tuple[int, str, int, float], RankProcesses] = {}
_group: list[GroupRanks] = []


def adopt(group: GroupRanks) -> None:
    """From now on every ring of this process is the group that torchrun started."""
    _group[:] = [group]


def adopted() -> bool:
    """Whether the ranks are torchrun's."""
    return bool(_group)


def ring(world: int, device: str, threads: int, timeout_s: float) -> RingOfRanks:
    """The living ring of that kind."""
    if _group:
        return _group[0].of_size(world)
    key = (world, device, threads, timeout_s)
    if key not in _rings or not _rings[key].alive:
        _rings[key] = RankProcesses(world, device, threads, timeout_s)
    return _rings[key]


def close_all() -> None:
    """End every ring."""
    while _rings:
        _rings.popitem()[1].close()
    while _group:
        _group.pop().close()
