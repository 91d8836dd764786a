"""Wins and means over several workloads: who is recommended, and how sure that is."""

from __future__ import annotations

import numpy as np
import pytest
from record_factory import noisy, ok, recommend, workload

from attnbench.results.ratios import mean_log_ratio
from attnbench.results.sentences import closing
from attnbench.results.tally import judge
from attnbench.spec import Ok


def pairs_of(*factors: float, seed: int = 0, spread: float = 0.01, rounds: int = 12) -> list[tuple[Ok, Ok]]:
    """Of b and a, b being so many times as slow."""
    made = []
    for place, factor in enumerate(factors):
        on, first = workload(128 * 2**place), 1000 * seed + 2 * place
        a = ok("torch.sdpa", noisy(1e6, first, spread, rounds), on)
        made.append((a, ok("torch.eager", noisy(factor * 1e6, first + 1, spread, rounds), on)))
    return made


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("between", [0.0, 0.3])
def test_intervals_over_few_workloads_cover_the_truth(count: int, between: float):
    """Shapes drawn from many whose mean ratio is 2: nineteen of twenty intervals hold it."""
    tries = 150
    rng = np.random.default_rng(count)
    hit = 0
    for seed in range(tries):
        factors = 2 * np.exp(between * rng.standard_normal(count))
        ratio = mean_log_ratio(pairs_of(*factors, seed=seed + 1)).ratio()
        hit += ratio.low <= 2 <= ratio.high
    assert hit / tries > 0.9


def test_two_shapes_are_not_an_interval_from_one_to_the_other():
    ratio = mean_log_ratio(pairs_of(1.5, 3)).ratio()
    assert ratio.low < 1 < 4 < ratio.high


def test_the_same_winner_on_each_of_few_shapes_is_told_without_a_mean():
    pairs = pairs_of(1.5, 6)
    verdict = judge(pairs)
    assert (verdict.sign, verdict.on_average) == (1, False)
    records = [record for pair in pairs for record in pair]
    assert closing(records).startswith("torch.sdpa is 1.5")
    assert "x to 6.0" in closing(records) or "x to 5.9" in closing(records)
    (winner,) = [one for one in recommend(records) if one.kind == "winner"]
    assert "use torch.sdpa, 1.5" in winner.text


def test_less_than_one_percent_is_no_reason_to_use_it():
    """Six shapes and tight rounds: certain, and not worth a word."""
    pairs = pairs_of(*[1.005] * 6, spread=1e-4, rounds=40)
    assert mean_log_ratio(pairs).ratio().low > 1
    assert judge(pairs).sign == 0
    kinds = {one.kind for one in recommend([record for pair in pairs for record in pair])}
    assert "tie" in kinds
    assert "winner" not in kinds


def test_shapes_that_disagree():
    pairs = pairs_of(0.5, 2)
    verdict = judge(pairs)
    assert verdict.sign == 0
    assert verdict.apart
    assert verdict.mixed
    records = [record for pair in pairs for record in pair]
    found = recommend(records)
    assert "mixed" in {one.kind for one in found}
    told = [closing(records), *(one.text for one in found)]
    assert not any("vary too much" in text for text in told), told
    assert "cannot be told apart (each is faster on some, 0.5" in told[0]
