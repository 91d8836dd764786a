"""The search for the first slow commit."""

from __future__ import annotations

from math import ceil, log2

import pytest
from gate_factory import comparison

from attnbench.comparing.bisect import find_first_slower, judge

COMMITS = [f"c{n:02d}" for n in range(20)]


@pytest.mark.parametrize("first", range(20))
def test_the_first_slow_one_in_few_steps(first: int):
    found = find_first_slower(COMMITS, lambda commit: commit >= COMMITS[first])
    assert (found.first, found.suspects) == (COMMITS[first], (COMMITS[first],))
    assert len(found.tried) <= ceil(log2(len(COMMITS)))
    assert COMMITS[-1] not in found.tried


def test_one_commit_needs_no_search():
    found = find_first_slower(["only"], lambda commit: pytest.fail("asked for nothing"))
    assert (found.first, found.tried) == ("only", {})


def test_none_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="no commit"):
        find_first_slower([], lambda commit: True)


def test_what_cannot_be_judged_is_stepped_over():
    broken = {"c08", "c09", "c10"}
    found = find_first_slower(COMMITS, lambda commit: None if commit in broken else commit >= "c14")
    assert found.first == "c14"
    assert all(found.tried[commit] is None for commit in broken & found.tried.keys())


def test_the_first_slow_one_among_those_that_cannot_be_judged():
    broken = {"c08", "c09", "c10"}
    found = find_first_slower(COMMITS, lambda commit: None if commit in broken else commit >= "c09")
    assert found.first is None
    assert found.suspects == ("c08", "c09", "c10", "c11")
    assert sum(answer is None for answer in found.tried.values()) == 3


def test_nothing_can_be_judged():
    found = find_first_slower(COMMITS, lambda commit: None)
    assert found.first is None
    assert found.suspects == tuple(COMMITS)
    assert len(found.tried) == len(COMMITS) - 1


@pytest.mark.parametrize(
    "verdict,ratio,slower",
    [
        ("slower", 1.05, True),
        ("same", 1.0, False),
        ("faster", 0.9, False),
        ("same", 1.035, None),
        ("inconclusive", 1.0, None),
        (None, 1.0, None),
    ],
)
def test_a_commit_is_as_fast_only_if_it_surely_lacks_the_slowdown(
    verdict: str | None, ratio: float, slower: bool | None
):
    sought = comparison("slower", 1.05)
    assert judge(comparison(verdict, ratio), sought) is slower
    assert judge(None, sought) is None


@pytest.mark.parametrize("ratio,slower", [(1.03, False), (1.2, True), (1.13, True), (1.105, None), (1.09, False)])
def test_a_small_slowdown_is_not_the_large_one_that_is_sought(ratio: float, slower: bool | None):
    """Half of 1.236, by factor, is 1.112."""
    assert judge(comparison("slower", ratio), comparison("slower", 1.236)) is slower


def test_the_metric_that_shows_the_slowdown_is_the_one_that_must_lack_it():
    sought = comparison("slower", 1.0, cpu=1.2)
    assert judge(comparison("same", 1.04, cpu=1.0), sought) is False
    assert judge(comparison("same", 1.0, cpu=1.195), sought) is None
