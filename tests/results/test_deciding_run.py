from __future__ import annotations

import msgspec
import pytest
from length_factory import GPU, along
from record_factory import incorrect, noisy, ok, recommend, timing, workload

from attnbench.measuring.rates import KERNELS_ONLY
from attnbench.results.records import clock_of, on_one_clock
from attnbench.results.sentences import closing, speedups
from attnbench.results.standings import Standings, rank
from attnbench.spec import Environment, Ok, Throughput


def run(seed: int, **medians: float) -> list[Ok]:
    return [ok(f"torch.{name}", noisy(ns, seed + i)) for i, (name, ns) in enumerate(medians.items())]


def deciding(*runs: list[Ok]) -> dict[str, Ok]:
    """Name -> record that is compared."""
    (standing,) = Standings(runs).overall.values()
    return standing.ranked


class TestRuns:
    def test_records_of_two_runs_are_never_a_pair(self):
        first, later = run(1, eager=4e6, flex=2e6), run(9, sdpa=1.95e6)
        assert set(deciding(first, later)) == {"torch.eager", "torch.flex"}
        assert not any("torch.sdpa" in one.text for one in recommend(first, later))
        clearly = run(9, sdpa=1e6)
        assert set(deciding(first, clearly)) == {"torch.sdpa"}
        assert {record.implementation for record in Standings([first, clearly]).records} == {
            "torch.eager",
            "torch.flex",
            "torch.sdpa",
        }

    def test_the_newest_run_with_both_counts(self):
        first, second, later = run(1, eager=4e6, sdpa=1e6), run(5, eager=4e6, sdpa=2e6), run(9, sdpa=1e6)
        assert deciding(first, second, later)["torch.sdpa"] is second[1]
        (winner,) = [one for one in recommend(first, second, later) if one.kind == "winner"]
        assert winner.figures[0].value == pytest.approx(2, rel=0.05)

    @pytest.mark.parametrize("shape", [{}, {"pass_": "train"}])
    def test_newer_is_what_was_measured_later_workload_by_workload(self, shape):
        """The first file is the older, and was resumed after the second was made, with one more workload."""
        begun, other = run(1, sdpa=1e6, eager=3e6), run(3, sdpa=2e6, eager=3e6)
        added = [ok(name, noisy(ns, 5), workload(**shape)) for name, ns in (("torch.sdpa", 6e6), ("torch.eager", 3e6))]
        whole, dates = (
            [*begun, *added],
            dict.fromkeys(map(id, begun), "2026-01") | dict.fromkeys(map(id, other), "2026-02"),
        )
        dates |= dict.fromkeys(map(id, added), "2026-11")
        if shape:
            other += [ok(one.implementation, noisy(2e6, 7), one.workload) for one in added]
            dates |= dict.fromkeys(map(id, other), "2026-02")
        standings = Standings([whole, other], dates=dates)
        assert standings.overall[added[0].workload.id].ranked["torch.sdpa"] is added[0]
        assert {id(one) for one in added} <= {id(one) for one in standings.newest}
        assert {id(one) for one in added} <= {id(one) for one in standings.records}
        plain = Standings([whole, other]).overall[added[0].workload.id]
        assert plain.ranked["torch.sdpa"] is other[2 if shape else 0]
        if shape:
            assert standings.overall[begun[0].workload.id].ranked["torch.sdpa"] is other[0]

    def test_a_record_that_is_not_ranked_makes_no_run_newer(self):
        old, new = run(1, sdpa=1e6, eager=3e6), run(3, sdpa=2e6, eager=3e6)
        wrong = incorrect("torch.flex", "wrong")
        dates = dict.fromkeys(map(id, old), "2026-01") | dict.fromkeys(map(id, new), "2026-02") | {id(wrong): "2026-11"}
        standings = Standings([[*old, wrong], new], dates=dates)
        assert next(iter(standings.overall.values())).ranked["torch.sdpa"] is new[0]

    @pytest.mark.parametrize("pace", [1.0, 0.3, 3.0])
    def test_a_smaller_run_counts_where_its_fastest_is_clearly_ahead_by_what_both_timed(self, pace):
        most = run(1, eager=4e6, flex=3e6, sdpa=2e6)
        ahead = run(9, sdpa=2e6 * pace, compiled=1e6 * pace)
        near = run(9, sdpa=2e6 * pace, compiled=1.95e6 * pace)
        assert set(deciding(most, ahead)) == {"torch.sdpa", "torch.compiled"}
        assert len(deciding(most, near)) == 3

    def test_a_clock_that_leaves_something_out_gives_way_to_a_whole_one(self):
        old, new = run(1, eager=1e6, flex=2e6, sdpa=3e6), run(9, eager=4e6, flex=2e6)
        part = [msgspec.structs.replace(one, time=msgspec.structs.replace(one.time, clock=KERNELS_ONLY)) for one in old]
        assert next(iter(deciding(part, new))) == "torch.flex"
        assert next(iter(deciding(new, part))) == "torch.flex"
        assert len(deciding(part, new[:1])) == 3

    def test_nothing_is_said_where_no_run_holds_two(self):
        assert recommend(run(1, eager=4e6), run(2, sdpa=1e6)) == []


class TestMachines:
    HERE = Environment(device="cpu", device_name="one", cpu="one", cores=8, threads=8, framework="torch")

    @pytest.mark.parametrize("other", [
        msgspec.structs.replace(HERE, device_name="two", cpu="two"), msgspec.structs.replace(HERE, threads=64), None,
    ], ids=["machine", "threads", "unknown"])  # fmt: skip
    def test_times_of_two_machines_are_not_ranked(self, other):
        environments = [self.HERE, self.HERE, other]
        records = [
            msgspec.structs.replace(one, environment=environment)
            for one, environment in zip(run(1, eager=2e6, flex=3e6, sdpa=1e6), environments)
        ]
        rows = {row.implementation: row for row in rank(records)}
        assert [rows[f"torch.{name}"].rank for name in ("eager", "flex", "sdpa")] == [1, 2, None]
        assert "another machine" in rows["torch.sdpa"].reason
        assert "torch.sdpa was timed on another machine" in closing(records)

    def test_the_framework_and_the_kind_of_device_make_no_other_machine(self):
        jax = msgspec.structs.replace(self.HERE, framework="jax")
        gpu = msgspec.structs.replace(self.HERE, device="cuda", device_name="GPU")
        records = [
            msgspec.structs.replace(one, environment=environment)
            for one, environment in zip(run(1, eager=2e6, flex=3e6, sdpa=1e6), (self.HERE, jax, gpu))
        ]
        assert all(row.rank for row in rank(records))


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
        (standing,) = Standings([[events, kernel]]).overall.values()
        (one,) = speedups(standing, "torch.eager")
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

    def across(*runs):
        return [one for one in recommend(*runs) if one.family.startswith("Overall · ")]

    assert across(torch_run, jax_run) == []
    (told,) = across([*torch_run, *jax_run])
    assert told.workloads == (torch_run[1].workload.id,)
    both = Standings([[*torch_run, *jax_run]]).overall[torch_run[1].workload.id]
    assert set(both.ranked) == {"torch.sdpa", "jax.cudnn"}
