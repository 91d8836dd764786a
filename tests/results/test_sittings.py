"""Cells that a resumed run adds to a workload took no turns with those before: neither ranked nor chosen among them."""

from __future__ import annotations

from msgspec import structs
from record_factory import noisy, ok

from attnbench.choosing.candidates import Source
from attnbench.choosing.choose import choose
from attnbench.results.ratios import paired_ratio
from attnbench.results.sentences import closing
from attnbench.results.standings import rank

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
    (entry,) = choose([Source("run", MORNING, records)]).policy.entries
    assert (entry.use.implementation, entry.use.candidates) == ("torch.a", 2)
