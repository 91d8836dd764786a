"""The median over all pairs, had other launches been drawn: the bootstrap that takes launches as wholes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 4000
SEED = 20240229


def median_draws(logs: Sequence[np.ndarray], seed: int = SEED) -> np.ndarray:
    """Medians over all pairs of launches drawn anew with replacement, ascending."""
    sizes = [len(one) for one in logs]
    pooled, owner = np.concatenate(logs), np.repeat(np.arange(len(logs)), sizes)
    order = np.argsort(pooled)
    ascending = pooled[order]
    passed = np.cumsum(owner[order, None] == np.arange(len(logs)), axis=0, dtype=float)
    times = np.random.default_rng(seed).multinomial(len(logs), [1 / len(logs)] * len(logs), DRAWS).astype(float)
    total = times @ np.array(sizes, float)
    lower, upper = (ascending[_first_reaching(passed, times, rank)] for rank in ((total + 1) // 2, total // 2 + 1))
    return np.sort((lower + upper) / 2)


def _first_reaching(passed: np.ndarray, times: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Per draw, where in ascending order `rank` values have been passed, a launch counted as often as it was drawn."""
    low, high = np.zeros(len(times), int), np.full(len(times), len(passed) - 1)
    while np.any(low < high):
        middle = (low + high) // 2
        reached = np.einsum("dl,dl->d", passed[middle], times) >= rank
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low
