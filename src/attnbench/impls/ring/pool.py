"""Rings of this process: started when first needed, shared by all cells of the same size, replaced when they fail."""

from __future__ import annotations

from attnbench.impls.ring.launcher import RankProcesses

_rings: dict[tuple[int, str, int, float], RankProcesses] = {}


def ring(world: int, device: str, threads: int, timeout_s: float) -> RankProcesses:
    """The living ring of that kind."""
    key = (world, device, threads, timeout_s)
    if key not in _rings or not _rings[key].alive:
        _rings[key] = RankProcesses(world, device, threads, timeout_s)
    return _rings[key]


def close_all() -> None:
    """End every ring."""
    while _rings:
        _rings.popitem()[1].close()
