"""Ranks: opened only by what is certainly slower than everything in the rank before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from record_factory import named_run, noisy, ok

from attnbench.choosing.choose import choose
from attnbench.results.ratios import RANK_LEVEL, paired_ratio
from attnbench.results.records import by_workload
from attnbench.results.run_file import read_run
from attnbench.results.sentences import closing
from attnbench.results.standings import Row, rank
from attnbench.spec import Ok

RESULTS = Path(__file__).parents[2] / "results"
Scatter = Callable[[np.random.Generator, int], np.ndarray]
"""Generator and number of rounds -> logarithms by which one implementation's rounds are off."""


def quiet(rng: np.random.Generator, rounds: int) -> np.ndarray:
    return 0.005 * rng.standard_normal(rounds)


def loud(rng: np.random.Generator, rounds: int) -> np.ndarray:
    return 0.03 * rng.standard_normal(rounds)


def bursty(rng: np.random.Generator, rounds: int) -> np.ndarray:
    return quiet(rng, rounds) + np.where(rng.random(rounds) < 0.2, rng.uniform(0, 1.1, rounds), 0)


def two_speeds(rng: np.random.Generator, rounds: int) -> np.ndarray:
    return quiet(rng, rounds) + 0.05 * rng.integers(2, size=rounds)


def marks(rows: list[Row]) -> list[tuple[str, int | None, bool, bool]]:
    return [(row.implementation, row.rank, row.tied, row.behind) for row in rows]


def told_apart(a: Row, b: Row) -> bool:
    assert isinstance(a.record, Ok)
    assert isinstance(b.record, Ok)
    return paired_ratio(a.record, b.record, RANK_LEVEL).sign > 0


@pytest.mark.parametrize("rounds", [8, 25, 60])
@pytest.mark.parametrize("scatter", [quiet, loud, bursty, two_speeds])
def test_two_names_for_one_function_are_ranked_apart_in_one_percent_at_most(scatter: Scatter, rounds: int):
    """Alone and between others, one of which is nearly as fast."""
    trials, apart, apart_in_a_field = 200, 0, 0
    rng = np.random.default_rng(rounds)
    for _ in range(trials):
        drift = np.cumsum(0.02 * rng.standard_normal(rounds))
        medians = {"one": 1e6, "two": 1e6, "near": 0.993e6, "far": 0.9e6, "slow": 1.05e6}
        made = [ok(name, median * np.exp(drift + scatter(rng, rounds))) for name, median in medians.items()]
        apart += len({row.rank for row in rank(made[:2])}) == 2
        apart_in_a_field += len({row.rank for row in rank(made) if row.implementation in ("one", "two")}) == 2
    assert apart <= 0.01 * trials
    assert apart_in_a_field <= 0.01 * trials


def test_less_than_one_percent_is_a_tie_however_certain():
    same = noisy(1e6, 1)
    assert marks(rank([ok("a", same), ok("b", same * 1.009)])) == [("a", 1, False, False), ("b", 1, True, False)]
    assert marks(rank([ok("a", same), ok("b", same * 1.02)])) == [("a", 1, False, False), ("b", 2, False, False)]


def test_a_chain_of_ties_is_one_rank_that_says_who_is_behind():
    same = noisy(1e6, 1)
    made = [
        ok(name, same * factor) for name, factor in (("a", 1), ("b", 1.008), ("c", 1.016), ("d", 1.023), ("e", 1.1))
    ]
    assert marks(rank(made)) == [
        ("a", 1, False, False),
        ("b", 1, True, False),
        ("c", 1, True, True),
        ("d", 1, True, True),
        ("e", 5, False, False),
    ]


def test_a_row_is_behind_if_any_of_its_rank_is_significantly_faster():
    """The first of the rank scatters widely, so that nothing is surely slower than it."""
    rng = np.random.default_rng(3)
    made = [
        ok(name, 1e6 * factor * np.exp(spread * rng.standard_normal(40)))
        for name, factor, spread in (("wide", 1.0, 0.3), ("tight", 1.01, 0.001), ("slower", 1.06, 0.001))
    ]
    found = {row.implementation: row for row in rank(made)}
    assert not told_apart(found["wide"], found["slower"])
    assert told_apart(found["tight"], found["slower"])
    assert {name: row.behind for name, row in found.items()} == {"wide": False, "tight": False, "slower": True}


def test_a_row_that_scatters_widely_shares_the_rank_of_its_twin_above():
    """The twin is neither first in its rank nor the row directly above."""
    rng = np.random.default_rng(4)
    first, noisy_twin, between, twin = (
        ok(name, 1e6 * factor * np.exp(spread * rng.standard_normal(40)))
        for name, factor, spread in (
            ("a", 1.0, 0.001),
            ("twin", 1.005, 0.2),
            ("b", 1.008, 0.001),
            ("twin-2", 1.04, 0.001),
        )
    )
    found = {row.implementation: row for row in rank([first, noisy_twin, between, twin])}
    assert told_apart(found["a"], found["twin-2"])
    assert told_apart(found["b"], found["twin-2"])
    assert not told_apart(found["twin"], found["twin-2"])
    assert {row.rank for row in found.values()} == {1}


def test_the_order_of_the_records_decides_nothing():
    same = noisy(1e6, 1)
    made = [ok("d", same * 1.05), ok("b", same), ok("a", same), ok("c", same * 1.012)]
    expected = [("a", 1, False, False), ("b", 1, True, False), ("c", 3, False, False), ("d", 4, False, False)]
    assert all(marks(rank(order)) == expected for order in permutations(made))


def test_medians_that_a_drift_has_shuffled_part_no_twins():
    """Something slows the machine down for half of the rounds and now and then hits one implementation only."""
    speed = np.repeat([1.0, 1.2], [21, 20])
    hit = np.where(np.arange(41) < 2, 1.5, 1.0)
    rows = rank([ok("one", 1e6 * speed), ok("slow", 1.05e6 * speed), ok("two", 1e6 * speed * hit)])
    assert [row.implementation for row in rows] == ["one", "slow", "two"], "by their medians"
    assert told_apart(rows[2], rows[1])
    assert marks(rows) == [("one", 1, False, False), ("slow", 1, True, True), ("two", 1, True, False)]


@pytest.mark.parametrize("run", ["h200/grid-gpu.jsonl", "h200/gemma.jsonl", "cpu/quick.jsonl"])
def test_a_new_rank_in_a_published_run_is_certainly_slower_than_all_of_the_last(run: str):
    for group in by_workload(read_run(RESULTS / run).records).values():
        rows = [row for row in rank(group) if row.rank is not None]
        for place, (above, row) in enumerate(pairwise(rows), start=1):
            last = [peer for peer in rows[:place] if peer.rank == above.rank]
            certain = all(told_apart(peer, row) for peer in last)
            beaten = any(told_apart(later, row) for later in rows[place + 1 :])
            assert (row.rank != above.rank) == (not row.tied) == (certain and not beaten)
            assert row.behind == (row.tied and any(told_apart(peer, row) for peer in last))
            assert row.rank in (above.rank, place + 1)


MORNING, EVENING = "2026-01-01T08:00:00.000000Z", "2026-01-01T20:00:00.000000Z"


def at(sitting, name, median, seed=1):
    record = ok(name, noisy(median, seed))
    return structs.replace(record, time=structs.replace(record.time, sitting=sitting))


def ranks(records):
    return {row.implementation: row.rank for row in rank(records)}


def test_most_cells_decide_which_sitting_is_ranked():
    records = [at(MORNING, "torch.a", 1e6), at(MORNING, "torch.b", 2e6, 2), at(EVENING, "torch.c", 5e5, 3)]
    assert ranks(records) == {"torch.a": 1, "torch.b": 2, "torch.c": None}
    (other,) = (row for row in rank(records) if row.rank is None)
    assert other.reason == "timed in another sitting, so that it took no turns with the others: not compared"
    assert other.speedup is None


def test_of_as_many_the_last_is():
    assert ranks([at(EVENING, "torch.a", 2e6), at(MORNING, "torch.b", 1e6)]) == {"torch.a": 1, "torch.b": None}


def test_one_kernel_under_two_names_is_not_said_to_be_faster_than_itself():
    told = closing([at(MORNING, "torch.sdpa", 2e6), at(EVENING, "torch.sdpa-flash", 1e6)])
    assert "faster" not in told
    assert "torch.sdpa was timed in another sitting" in told


def test_records_that_do_not_say_are_of_one_sitting_but_not_of_a_later_one():
    old = [at("", "torch.a", 1e6), at("", "torch.b", 2e6, 2)]
    assert ranks(old) == {"torch.a": 1, "torch.b": 2}
    assert ranks([*old, at(EVENING, "torch.c", 5e5)])["torch.c"] is None


def test_a_turn_of_its_own_is_compared_but_not_round_by_round():
    """The machine's drift, which pairs of rounds share, widens the interval of what was timed after it."""
    first, beside, after = (
        at(MORNING, "torch.a", 1e6),
        at(MORNING, "torch.b", 2e6, 2),
        at(f"{MORNING}+1", "torch.b", 2e6, 2),
    )
    assert ranks([first, after]) == {"torch.a": 1, "torch.b": 2}
    paired, unpaired = paired_ratio(first, beside), paired_ratio(first, after)
    assert unpaired.high - unpaired.low > 3 * (paired.high - paired.low)


def test_a_clock_beside_the_published_one_is_of_the_same_sitting():
    by_kernel = structs.replace(ok("torch.b", noisy(2e6, 2)).time, clock="kernel")
    published = structs.replace(by_kernel, sitting=MORNING)
    first = structs.replace(at(MORNING, "torch.a", 1e6), also={"kernel": by_kernel})
    others = [structs.replace(at(MORNING, name, 3e6, 3), time=published) for name in ("torch.b", "torch.c")]
    assert None not in ranks([first, *others]).values()


def test_a_policy_is_chosen_within_a_sitting():
    records = [at(MORNING, "torch.a", 1e6), at(MORNING, "torch.b", 2e6, 2), at(EVENING, "torch.c", 5e5, 3)]
    (entry,) = choose([named_run("run", MORNING, records)]).policy.entries
    assert (entry.use.implementation, entry.use.candidates) == ("torch.a", 2)
