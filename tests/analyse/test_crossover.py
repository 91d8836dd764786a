from __future__ import annotations

import pytest
from length_factory import LENGTHS, along
from record_factory import ok

from attnbench.analyse.crossover import crossover


def flash(n: int) -> float:
    """A large fixed cost and little per pair: passes `eager` at 1000."""
    return 1e6 + n


def eager(n: int) -> float:
    return 1001.0 * n


def test_a_crossing_is_found_between_the_measured_lengths():
    found = crossover(along("flash", flash, seed=1), along("eager", eager, seed=2))
    assert found.kind == "from"
    low, high = found.interval
    assert 900 < found.length < 1100
    assert {low, high} <= set(LENGTHS)
    assert low < found.length < high
    assert found.lengths == LENGTHS
    assert found.ratios[0].value < 1 < found.ratios[-1].value


def test_the_other_way_round_is_the_mirror():
    there = crossover(along("flash", flash, seed=1), along("eager", eager, seed=2))
    back = crossover(along("eager", eager, seed=2), along("flash", flash, seed=1))
    assert back.kind == "until"
    assert back.length == pytest.approx(there.length, rel=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Both curves are power laws, so that interpolating in logarithms adds no error of its own."""
    hits = 0
    for seed in range(100):
        a, b = along("a", lambda n: 1000.0**0.5 * n**0.5, seed=2 * seed), along("b", float, seed=2 * seed + 1)
        low, high = crossover(a, b).interval
        hits += low <= 1000 <= high
    assert hits >= 88


def test_a_tie_between_the_certain_lengths_is_within_the_interval():
    def near(n: int) -> float:
        return {256: 2.0, 512: 1.2, 1024: 1.0, 2048: 0.8, 4096: 0.5}[n] * 1e6

    found = crossover(along("a", near, seed=1), along("b", lambda n: 1e6, seed=2))
    low, high = found.interval
    assert (low, high) == (512, 2048)
    assert found.point is None


def test_near_neighbours_give_a_point():
    found = crossover(along("flash", flash, (512, 768, 1280), seed=1), along("eager", eager, (512, 768, 1280), seed=2))
    assert found.interval == (768, 1280)
    assert found.point == found.length


@pytest.mark.parametrize("truth", [600, 1000, 3000, 7000])
def test_what_was_not_measured_may_hide_the_crossing_anywhere(truth):
    """Both curves bend between the two measured lengths, so a straight line through them misses the crossing."""
    lengths = (256, 512, 8192)

    def bent(n: int) -> float:
        return 1e6 if n < truth else 1e5

    found = crossover(along("a", bent, lengths, seed=1), along("b", lambda n: 3e5, lengths, seed=2))
    low, high = found.interval
    assert (low, high) == (512, 8192)
    assert low <= truth <= high
    assert found.point is None


@pytest.mark.parametrize(
    ("factors", "kind"),
    [
        ((0.5, 0.5, 0.5, 0.5, 0.5), "always"),
        ((1.0, 1.0, 0.5, 1.0, 0.5), "always"),
        ((2.0, 2.0, 1.0, 2.0, 2.0), "never"),
        ((1.0, 1.0, 1.0, 1.0, 1.0), "same"),
        ((0.5, 2.0, 0.5, 0.5, 0.5), "mixed"),
        ((0.5, 0.5, 0.5, 0.5, 2.0), "until"),
    ],
)
def test_what_there_is_no_length_for_has_a_name(factors, kind):
    table = dict(zip(LENGTHS, factors))
    found = crossover(along("a", lambda n: 1e6 * table[n], seed=1), along("b", lambda n: 1e6, seed=2))
    assert found.kind == kind
    assert (found.length is not None) == (kind == "until")
    assert found.signs == tuple((factor < 1) - (factor > 1) for factor in factors)


def test_only_lengths_that_both_have_count():
    found = crossover(along("a", flash, LENGTHS[:3]), along("b", eager, LENGTHS[2:], seed=1))
    assert found.lengths == (1024,)
    assert crossover(along("a", flash, LENGTHS[:2]), along("b", eager, LENGTHS[2:])) is None
    assert crossover([ok("a")], [ok("b")]) is None
