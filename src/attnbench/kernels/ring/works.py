"""From a workload's mask to the work of a rank, and its share of the whole."""

from __future__ import annotations

from attnbench.kernels.ring import schedule
from attnbench.kernels.ring.dilated_work import DilatedWork, Pattern, plan
from attnbench.kernels.ring.kernels import Kernels
from attnbench.kernels.ring.schedule import Problem
from attnbench.kernels.ring.work import DenseWork, Work
from attnbench.masks import Dilated
from attnbench.spec import Workload


def work_of(workload: Workload, problem: Problem, rank: int, kernels: Kernels) -> Work:
    """One rank's part of a workload."""
    pattern = _pattern(workload)
    if pattern is None:
        return DenseWork(problem, rank, kernels)
    return DilatedWork(problem, rank, kernels, pattern)


def pairs_of(workload: Workload, problem: Problem) -> tuple[int, ...]:
    """Pairs that each rank computes for one batch row and, on average, one head."""
    pattern = _pattern(workload)
    if pattern is None:
        return schedule.pairs(problem)
    plans = [plan(problem, rank, pattern) for rank in range(problem.world)]
    return tuple(sum(call.pairs for turn in one for call in turn) // workload.heads for one in plans)


def _pattern(workload: Workload) -> Pattern | None:
    mask = next((part for part in workload.visible_mask.split() if isinstance(part, Dilated)), None)
    return None if mask is None else Pattern(mask, workload.heads, workload.kv_heads)
