"""Calls that are compared take turns: rounds in an order drawn anew, and ratios over rounds with their interval."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from attnbench.comparing.statistics import median_draws

Name = TypeVar("Name", bound=Hashable)


def in_turn(calls: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Name -> what its call returned, once a round."""
    rng, names = np.random.default_rng(0), list(calls)
    taken: dict[Name, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for index in rng.permutation(len(names)):
            taken[names[index]].append(calls[names[index]]())
    return taken


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, list[float]]:
    """The median over rounds of above / below, and its 95 % interval."""
    logs = np.log(above) - np.log(below)
    return float(np.exp(np.median(logs))), interval(logs)


def interval(logs: np.ndarray) -> list[float]:
    """95 % of the median, rounds drawn anew."""
    draws = median_draws([logs[n : n + 1] for n in range(len(logs))])
    return [float(np.exp(value)) for value in np.quantile(draws, [0.025, 0.975])]
