"""A series of values -> its levels: asv's piecewise-constant fit, seconded by Otava where that is installed.

asv also chooses the penalty of a step by itself, but allows for noise that wanders, which explains many a step in a
short series away. So the penalty is ours, from the noise between neighbours; the fit is asv's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import log

import numpy as np
from msgspec import Struct

THRESHOLD = 0.02
"""A smaller step is none."""
LEAST_POINTS = 6
"""Of a series in which steps are looked for."""
SHORTEST_LEVEL = 2
"""One point on its own is an outlier."""
PENALTY = 3.0
"""Times noise times ln(points): high enough for no step in noise, low enough for one of five times the noise."""
LEAST_NOISE = 0.002
MEDIAN_STEP = 0.6745 * 2**0.5
"""Median distance of two neighbours in normal noise, in standard deviations."""
OTAVA_RISK = 0.001
NEAR = 2
"""Points by which the two detectors may differ."""


class Level(Struct, frozen=True):
    """Consecutive points of one height; `start` is the first, `stop` follows the last."""

    start: int
    stop: int
    value: float
    """Median of its points, outliers between them left out."""


def detector_missing() -> str | None:
    """None when steps can be looked for; else what to install."""
    return None if find_spec("asv") else 'steps need asv: pip install "attnbench[history]"'


def find_levels(values: Sequence[float]) -> tuple[Level, ...]:
    """Levels of a series of logarithms; a single one when it is steady or too short to tell."""
    series = np.asarray(values, float)
    whole = [list(range(len(series)))] if len(series) else []
    pieces = _fitted(series) if len(series) >= LEAST_POINTS else whole
    pieces = [piece for piece in pieces if len(piece) >= SHORTEST_LEVEL] or whole
    pieces = _without_small_steps(series, pieces)
    if len(pieces) > 1 and find_spec("otava"):
        pieces = _seconded(pieces, _otava_points(series))
    return tuple(Level(piece[0], piece[-1] + 1, float(np.median(series[piece]))) for piece in pieces)


def _fitted(series: np.ndarray) -> list[list[int]]:
    from asv.step_detect import solve_potts_approx

    noise = max(float(np.median(np.abs(np.diff(series)))) / MEDIAN_STEP, LEAST_NOISE)
    penalty = PENALTY * noise * log(len(series))
    ends, _, _ = solve_potts_approx(series.tolist(), [1.0] * len(series), gamma=penalty)
    return [list(range(start, end)) for start, end in zip([0, *ends], ends)]


def _without_small_steps(series: np.ndarray, pieces: list[list[int]]) -> list[list[int]]:
    """Neighbours that differ by less than the threshold become one, the nearest first."""
    while len(pieces) > 1:
        heights = [np.median(series[piece]) for piece in pieces]
        gaps = np.abs(np.diff(heights))
        least = int(np.argmin(gaps))
        if gaps[least] >= log(1 + THRESHOLD):
            break
        pieces = _joined(pieces, least)
    return pieces


def _seconded(pieces: list[list[int]], points: Sequence[int]) -> list[list[int]]:
    """Only the steps that the other detector sees as well."""
    for index in reversed(range(len(pieces) - 1)):
        if not any(abs(point - pieces[index + 1][0]) <= NEAR for point in points):
            pieces = _joined(pieces, index)
    return pieces


def _joined(pieces: list[list[int]], index: int) -> list[list[int]]:
    return [*pieces[:index], pieces[index] + pieces[index + 1], *pieces[index + 2 :]]


def _otava_points(series: np.ndarray) -> list[int]:
    from otava.analysis import compute_change_points

    # One window over all: overlapping ones can yield a point twice, on which Otava 0.8 stumbles.
    found, _ = compute_change_points(np.exp(series), window_len=2 * len(series), max_pvalue=OTAVA_RISK)
    return [point.index for point in found]
