"""A model of the time of a ring of any size, from measured kernel times and a stated link. It is not a measurement.

Every rank has a device of its own, like the one whose kernels were timed; a step lasts as long as the slowest rank's
computation or as the transfer behind it, whichever is longer; links do not disturb each other; nothing else costs time
(merging is in the kernels' measured time).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from attnbench.kernels.ring.schedule import RingProblem, Tile, schedule
from attnbench.spec import DTYPE_BYTES, Pass, Workload

TileTime = Callable[[Tile], tuple[float, float]]
"""Seconds of a tile's forward and backward pass."""
SUM_BYTES = {"float64": 8}
"""Bytes of a number in the sums of dK and dV: float32 but for float64."""


class Link(NamedTuple):
    """A link as stated, not measured."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Return the seconds that it takes to send `size` bytes."""
        return self.latency_s + size / self.bytes_per_s if size else 0.0


class Modelled(Struct, frozen=True, kw_only=True):
    """The model's figures for one number of ranks; `modelled` says so in every printed entry."""

    modelled: bool = True
    world: int
    layout: str
    seconds: float
    compute_s: float
    """Computation of the slowest rank of each step, added up."""
    exposed_s: float
    """Transfers that computation does not hide, added up."""
    communication_s: float
    """All transfers, added up."""
    speedup: float
    """Over one rank by the same model."""
    efficiency: float
    """Speed-up over the number of ranks."""


def model(workload: Workload, problem: RingProblem, tile_time: TileTime, link: Link) -> Modelled:
    """Model the time of the workload's pass."""
    single = _total(workload, problem._replace(world=1), tile_time, link)[0]
    seconds, compute, communication = _total(workload, problem, tile_time, link)
    return Modelled(
        world=problem.world,
        layout=problem.layout,
        seconds=seconds,
        compute_s=compute,
        exposed_s=seconds - compute,
        communication_s=communication,
        speedup=single / seconds,
        efficiency=single / seconds / problem.world,
    )


def _total(workload: Workload, problem: RingProblem, tile_time: TileTime, link: Link) -> tuple[float, float, float]:
    """Return (seconds, computation, communication) over all steps of the pass."""
    directions: dict[Pass, tuple[int, ...]] = {"forward": (0,), "backward": (1,), "train": (0, 1)}
    plans = [schedule(problem, rank) for rank in range(problem.world)]
    largest = max(problem.kv_sizes())
    seconds = computation = communication = 0.0
    for direction in directions[workload.pass_]:
        for turn in range(problem.world):
            slowest = max(sum(tile_time(tile)[direction] for tile in plan[turn].tiles) for plan in plans)
            sent = link.seconds(_bytes(workload, problem, turn, largest, direction))
            seconds += max(slowest, sent)
            computation += slowest
            communication += sent
    return seconds, computation, communication


def _bytes(workload: Workload, problem: RingProblem, turn: int, tokens: int, direction: int) -> int:
    """Count the bytes a rank sends in a turn: K and V except in the last, and backward the sums of their gradients."""
    if problem.world == 1:
        return 0
    numbers = workload.batch * tokens * workload.kv_heads * (workload.head_dim + workload.value_dim)
    keys = 0 if turn == problem.world - 1 else numbers * DTYPE_BYTES[workload.dtype]
    return keys + direction * numbers * SUM_BYTES.get(workload.dtype, 4)


def idle_share(problem: RingProblem) -> float:
    """Return the share of the ranks' time spent waiting for the busiest rank of each step, if time were pairs."""
    plans = [schedule(problem, rank) for rank in range(problem.world)]
    work = [[sum(tile.pairs for tile in step.tiles) for step in plan] for plan in plans]
    busiest = sum(max(row[turn] for row in work) for turn in range(problem.world))
    total = sum(map(sum, work))
    return 1 - total / (busiest * problem.world) if busiest else 0.0
