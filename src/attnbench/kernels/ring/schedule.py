"""The whole plan of a ring, before anything is computed: whose keys a rank meets at each step, and what it does."""

from __future__ import annotations

from typing import NamedTuple

from attnbench.errors import UsageError
from attnbench.kernels.ring import layouts
from attnbench.kernels.ring.tiles import Tile, block_tiles


class Problem(NamedTuple):
    """What is sharded over whom. `shift`: query i sees keys up to i + shift, when causal."""

    q_len: int
    kv_len: int
    world: int
    layout: str
    causal: bool
    shift: int = 0

    def check(self) -> None:
        """Raises for what cannot be."""
        layouts.check_layout(self.layout)
        if self.world < 1:
            raise UsageError(f"a ring has at least 1 rank, not {self.world}.")
        if min(self.q_len, self.kv_len) < 1:
            raise UsageError("a ring needs at least one query and one key.")

    def q_sizes(self) -> tuple[int, ...]:
        """Queries of each rank."""
        return layouts.sizes(self.layout, self.q_len, self.world)

    def kv_sizes(self) -> tuple[int, ...]:
        """Keys of each rank."""
        return layouts.sizes(self.layout, self.kv_len, self.world)


class Step(NamedTuple):
    """One turn of the ring for one rank."""

    source: int
    """Whose keys and values are here now."""
    tiles: tuple[Tile, ...]
    """What of them is seen: empty when nothing is."""


def schedule(problem: Problem, rank: int, limit: int | None = None) -> tuple[Step, ...]:
    """The steps of one rank. Everything moves to the next rank, so at step s the keys of rank - s are here.

    Keys from position `limit` on are hidden.
    """
    problem.check()
    queries = layouts.runs(problem.layout, problem.q_len, problem.world, rank)
    steps = []
    for turn in range(problem.world):
        source = (rank - turn) % problem.world
        keys = layouts.runs(problem.layout, problem.kv_len, problem.world, source)
        keys = keys if limit is None else layouts.before(keys, limit)
        steps.append(Step(source, block_tiles(queries, keys, problem.causal, problem.shift)))
    return tuple(steps)


def pairs(problem: Problem) -> tuple[int, ...]:
    """Visible pairs of each rank over the whole ring: its share of the work."""
    plans = (schedule(problem, rank) for rank in range(problem.world))
    return tuple(sum(tile.pairs for step in plan for tile in step.tiles) for plan in plans)


def idle_share(problem: Problem) -> float:
    """Share of the ranks' time in which some wait for the busiest of each step, if time were visible pairs."""
    plans = [schedule(problem, rank) for rank in range(problem.world)]
    work = [[sum(tile.pairs for tile in step.tiles) for step in plan] for plan in plans]
    busiest = sum(max(row[turn] for row in work) for turn in range(problem.world))
    total = sum(map(sum, work))
    return 1 - total / (busiest * problem.world) if busiest else 0.0
