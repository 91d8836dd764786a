from __future__ import annotations

import msgspec
import pytest
from length_factory import GPU, along
from record_factory import noisy, ok, timing, workload

from attnbench.analyse.clocks import clock_of, on_one_clock
from attnbench.analyse.ranking import rank
from attnbench.analyse.recommend import recommend
from attnbench.analyse.speedup import speedups
from attnbench.analyse.summary import closing
from attnbench.analyse.together import across_frameworks, newest, timed_together
from attnbench.spec import Ok, Throughput


def run(seed: int, **medians: float) -> list[Ok]:
    return [ok(f"torch.{name}", noisy(ns, seed + i)) for i, (name, ns) in enumerate(medians.items())]


class TestRuns:
    def test_records_of_two_runs_are_never_a_pair(self):
        first, later = run(1, eager=4e6, flex=2e6), run(9, sdpa=1e6)
        assert {record.implementation for record in timed_together([first, later])} == {"torch.eager", "torch.flex"}
        assert not any("torch.sdpa" in one.text for one in recommend(first, later))
        assert {record.implementation for record in newest([first, later])} == {
            "torch.eager",
            "torch.flex",
            "torch.sdpa",
        }

    def test_the_newest_run_with_both_counts(self):
        first, second, later = run(1, eager=4e6, sdpa=1e6), run(5, eager=4e6, sdpa=2e6), run(9, sdpa=1e6)
        found = {record.implementation: record for record in timed_together([first, second, later])}
        assert found["torch.sdpa"] is second[1]
        (winner,) = [one for one in recommend(first, second, later) if one.kind == "winner"]
        assert winner.figures[0].value == pytest.approx(2, rel=0.05)

    @pytest.mark.parametrize("pace", [1.0, 0.3, 3.0])
    def test_a_smaller_run_counts_where_its_fastest_is_clearly_ahead_by_what_both_timed(self, pace):
        most = run(1, eager=4e6, flex=3e6, sdpa=2e6)
        ahead = run(9, sdpa=2e6 * pace, compiled=1e6 * pace)
        near = run(9, sdpa=2e6 * pace, compiled=1.95e6 * pace)
        assert {record.implementation for record in timed_together([most, ahead])} == {"torch.sdpa", "torch.compiled"}
        assert len(timed_together([most, near])) == 3

    def test_nothing_is_said_where_no_run_holds_two(self):
        assert recommend(run(1, eager=4e6), run(2, sdpa=1e6)) == []


class TestClocks:
    def test_a_clock_beside_the_published_one_is_compared(self):
        rates = Throughput(tokens_per_s=100.0, calls_per_s=1.0, samples_per_s=1.0)
        events = ok(
            "torch.eager",
            time=timing(noisy(4e6, 1), clock="events"),
            also={"kernel": timing(noisy(2e6, 2), clock="kernel")},
            throughput=rates,
        )
        kernel = ok("jax.xla", time=timing(noisy(1e6, 3), clock="kernel"))
        swapped, same = on_one_clock([events, kernel])
        assert isinstance(swapped, Ok)
        assert swapped.throughput is not None
        assert (clock_of(swapped), clock_of(same)) == ("kernel", "kernel")
        assert swapped.throughput.tokens_per_s == pytest.approx(200, rel=0.05)
        rows = rank([events, kernel], "torch.eager")
        assert [row.implementation for row in rows] == ["jax.xla", "torch.eager"]
        assert rows[0].speedup is not None
        assert rows[0].speedup.value == pytest.approx(2, rel=0.05)
        (one,) = speedups([events, kernel], "torch.eager")
        assert one.ratio.value == pytest.approx(2, rel=0.05)
        assert "2.0" in closing([events, kernel])

    def test_a_part_of_a_call_is_no_clock(self):
        train = ok(
            "torch.eager",
            time=timing(noisy(4e6, 1), clock="events"),
            also={"forward": timing(noisy(1e6, 2), clock="kernel")},
        )
        kernel = [ok(f"jax.{n}", time=timing(noisy(1e6, n), clock="kernel")) for n in (3, 4)]
        rows = rank([train, *kernel], "torch.eager")
        assert [row.speedup for row in rows] == [None] * 3
        (left,) = [row for row in rows if row.rank is None]
        assert left.implementation == "torch.eager"
        assert "another clock (events; the others by kernel)" in left.reason

    def test_one_clock_is_left_alone(self):
        records = [ok("a", noisy(1e6, 1)), ok("b", noisy(2e6, 2), workload())]
        assert on_one_clock(records) == records


def test_frameworks_are_held_against_each_other_only_where_one_run_timed_both():
    jax = msgspec.structs.replace(GPU, framework="jax")
    torch_run = along("torch.sdpa", float, (256, 512))
    jax_run = along("jax.cudnn", float, (512, 1024), environment=jax)
    assert across_frameworks([torch_run, jax_run]) == {}
    ((kind, members),) = across_frameworks([[*torch_run, *jax_run]]).items()
    assert kind.title.startswith("Overall · ")
    assert {(record.implementation, record.workload.q_len) for record in members} == {
        ("torch.sdpa", 512),
        ("jax.cudnn", 512),
    }
