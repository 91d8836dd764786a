"""Steps in synthetic series whose truth is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("ruptures")

from attnbench.comparing.history import LEAST_POINTS, _is_step, find_levels, smallest_step


def noise(points: int, seed: int, spread: float = 0.01) -> np.ndarray:
    return 1.3 + spread * np.random.default_rng(seed).standard_normal(points)


def with_step(points: int, seed: int, ratio: float, at: int) -> np.ndarray:
    series = noise(points, seed)
    series[at:] += np.log(ratio)
    return series


def test_no_step_in_noise():
    found = [seed for seed in range(50) if len(find_levels(noise(30, seed))) != 1]
    assert found == []


@pytest.mark.parametrize("ratio", [1.05, 1 / 1.05])
def test_a_step_of_5_percent_is_found_in_its_place(ratio: float):
    missed, more = [], []
    for seed in range(50):
        levels = find_levels(with_step(30, seed, ratio, at=14))
        near = [pair for pair in pairwise(levels) if abs(pair[1].start - 14) <= 1]
        if not near or abs(near[0][1].value - near[0][0].value - np.log(ratio)) > 0.015:
            missed.append(seed)
        if len(levels) > 2:
            more.append(seed)
    assert missed == []
    assert len(more) <= 1  # noise that happens to look like a step of its own


def test_a_step_below_the_threshold_is_none():
    assert all(len(find_levels(with_step(60, seed, 1.01, at=30))) == 1 for seed in range(20))


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("points", [8, 15, 30])
def test_two_speeds_of_steady_code_are_hardly_ever_a_step(points: int, share: float):
    found = []
    for seed in range(50):
        random = np.random.default_rng(seed)
        series = 0.05 * (random.random(points) < share) + 0.003 * random.standard_normal(points)
        found.append(len(find_levels(series.tolist())) > 1)
    assert sum(found) <= 5


@pytest.mark.parametrize("speeds", [0.0, 0.1])
@pytest.mark.parametrize("points, at", [(8, 4), (8, 6), (20, 10), (40, 38)])
def test_a_step_that_is_called_visible_is_found(points: int, at: int, speeds: float):
    missed = []
    for seed in range(50):
        random = np.random.default_rng(seed)
        series = speeds * (random.random(points) < 0.5) + 0.01 * random.standard_normal(points)
        size, stepped = 0.0, series
        while size < np.log1p(smallest_step(stepped.tolist())) - 1e-9:  # the step itself may add to the noise
            size = np.log1p(smallest_step(stepped.tolist()))
            stepped = np.where(np.arange(points) < at, series, series + size)
        missed += [seed] * (len(find_levels(stepped.tolist())) == 1)
    assert len(missed) <= 5


def test_the_smallest_step_that_is_found_grows_with_the_noise():
    assert smallest_step([0.5] * 20) == pytest.approx(0.02)
    assert smallest_step(noise(8, 1, 0.03).tolist()) > 0.1
    assert np.isfinite(smallest_step([0.0, 700.0] * 5))


def test_levels_whose_points_mix_are_none():
    low, high = np.repeat([0.0, 0.05], [6, 2]), np.repeat([0.0, 0.05], [2, 6])
    assert not _is_step(low, high)
    assert not _is_step(high, low)
    assert _is_step(low - 0.05, high)
    assert _is_step(high, low - 0.05)


@pytest.mark.parametrize("place", [0, 7, 15, 29])
def test_an_outlier_is_no_step(place: int):
    for seed in range(20):
        series = noise(30, seed)
        series[place] += 0.5
        assert len(find_levels(series)) == 1


def test_an_outlier_beside_a_step_belongs_to_neither_level():
    series = with_step(30, 3, 1.10, at=15)
    series[15] += 2
    before, after = find_levels(series)
    assert before.stop <= 15 < after.start == 16


def test_up_and_down_again_are_three_levels():
    series = noise(45, 5)
    series[15:30] += np.log(1.08)
    assert [(round(level.start / 15), round(level.stop / 15)) for level in find_levels(series)] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]


def test_short_and_empty_series_have_one_level_or_none():
    assert find_levels([]) == ()
    (level,) = find_levels([0.0] * (LEAST_POINTS - 3) + [1.0, 1.0])
    assert (level.start, level.stop) == (0, LEAST_POINTS - 1)
    (level,) = find_levels([0.5] * 20)
    assert level.value == 0.5
