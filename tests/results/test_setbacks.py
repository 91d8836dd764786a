"""What a newer run says of an older time: incorrect, and the time is left out; lost, and it is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs
from record_factory import CPU, incorrect, noisy, ok, workload

from attnbench.results.recommend import recommend
from attnbench.results.sentences import answer, setback_sentences, speedups
from attnbench.results.standings import Standings, setbacks
from attnbench.spec import ONLY_TIMED, Environment, Failed, Ok, OutOfMemory, Record, Timeout, Unsupported

GPU = structs.replace(CPU, device="cuda", device_name="Test GPU")
LEFT_OUT = "torch.sdpa is left out on 1 shape: a newer run found it incorrect."


def run(**medians: float) -> list[Record]:
    return [ok(f"torch.{name}", noisy(ns, seed)) for seed, (name, ns) in enumerate(medians.items())]


OLD = run(sdpa=1e6, eager=2e6, math=3e6)
WRONG = [incorrect("torch.sdpa", "first wrong row 3"), *run(eager=2.2e6, math=3e6)]


def ranked(*runs: Sequence[Record]) -> list[str]:
    (standing,) = Standings(runs).overall.values()
    return list(standing.ranked)


def lost(kind: type[Failed | OutOfMemory | Timeout], **fields: object) -> Record:
    return kind(implementation="torch.sdpa", workload=workload(), reason="boom", environment=CPU, **fields)


class TestIncorrect:
    def test_a_newer_incorrect_record_takes_the_older_time_away(self):
        standings = Standings([OLD, WRONG])
        assert ranked(OLD, WRONG) == ["torch.eager", "torch.math"]
        assert {record.status for record in standings.records if record.implementation == "torch.sdpa"} == {"incorrect"}
        assert answer(standings).startswith(LEFT_OUT)
        assert all(one.pick is None or one.pick.name == "torch.eager" for one in recommend(OLD, WRONG))
        gains = [gain for standing in standings.overall.values() for gain in speedups(standing, "torch.eager")]
        assert {gain.implementation for gain in gains} == {"torch.math"}

    def test_also_if_nothing_else_was_measured_again(self):
        assert ranked(OLD, WRONG[:1]) == ["torch.eager", "torch.math"]
        assert ranked(OLD, run(flex=3e6), WRONG[:1]) == ["torch.eager", "torch.math"]

    def test_a_newer_right_record_counts_again(self):
        assert ranked(OLD, WRONG, OLD)[0] == "torch.sdpa"
        assert ranked(WRONG, OLD)[0] == "torch.sdpa"
        assert ranked(OLD, WRONG[:1], [ok("torch.sdpa")])[0] == "torch.sdpa"
        assert setbacks([WRONG, OLD]) == []

    def test_a_check_without_timing_does_not_clear_what_timed_calls_showed(self):
        timed_wrong = [incorrect("torch.sdpa", f"{ONLY_TIMED} output, right when checked")]
        assert ranked(OLD, timed_wrong, [ok("torch.sdpa")]) == ["torch.eager", "torch.math"]
        assert ranked(OLD, timed_wrong, [OLD[0]])[0] == "torch.sdpa"

    def test_a_loss_after_it_does_not_clear_it(self):
        assert ranked(OLD, WRONG, [lost(Failed)]) == ["torch.eager", "torch.math"]

    @pytest.mark.parametrize("other", [
        incorrect("torch.sdpa", "wrong", workload(256)),
        incorrect("torch.sdpa", "wrong", config={"block": 64}),
        incorrect("torch.sdpa-flash", "wrong"),
        incorrect("torch.pair[backward=torch.eager,forward=torch.sdpa]", "wrong"),
        structs.replace(incorrect("torch.sdpa", "wrong"), environment=GPU),
    ], ids=["workload", "config", "name", "pair", "device"])  # fmt: skip
    def test_another_cell_or_device_takes_nothing_away(self, other: Record):
        assert setbacks([OLD, [other]]) == []
        assert next(iter(next(iter(Standings([OLD, [other]]).overall.values())).ranked)) == "torch.sdpa"

    @pytest.mark.parametrize("here", [
        structs.replace(CPU, packages={"torch": "2.14.0"}),
        structs.replace(CPU, threads=1),
    ])  # fmt: skip
    def test_other_versions_and_threads_of_one_device_do(self, here: Environment):
        newer = structs.replace(WRONG[0], environment=here)
        assert ranked(OLD, [newer]) == ["torch.eager", "torch.math"]


class TestLost:
    @pytest.mark.parametrize(
        ("kind", "status"), [(Failed, "failed"), (Timeout, "timeout"), (OutOfMemory, "out of memory")]
    )
    def test_a_loss_leaves_the_older_time_and_is_told(self, kind: type[Failed | OutOfMemory | Timeout], status: str):
        newer = [lost(kind), *run(eager=2e6)]
        assert ranked(OLD, newer)[0] == "torch.sdpa"
        told = f"torch.sdpa is compared by older times on 1 shape: a newer run has none ({status}: boom)."
        assert answer(Standings([OLD, newer])).startswith(told)

    def test_it_is_not_told_where_the_newer_run_decides(self):
        ahead = [lost(Failed), *run(eager=2e6, flex=0.5e6)]
        assert ranked(OLD, ahead) == ["torch.flex", "torch.eager"]
        assert Standings([OLD, ahead]).setbacks == []

    @pytest.mark.parametrize("other", [
        lost(Failed, unstarted=True),
        Unsupported(implementation="torch.sdpa", workload=workload(), reason="not installed", environment=CPU),
    ], ids=["unstarted", "unsupported"])  # fmt: skip
    def test_what_was_not_tried_is_no_loss(self, other: Record):
        assert setbacks([OLD, [other]]) == []


def test_shapes_are_counted_once_and_implementations_have_a_sentence_each():
    on = [workload(n) for n in (128, 256)]
    old = [ok(name, noisy(1e6, 1), one) for name in ("torch.a", "torch.b") for one in on]
    new = [incorrect("torch.a", "wrong", one) for one in on]
    new.append(Failed(implementation="torch.b", workload=on[0], reason="boom", environment=CPU))
    assert setback_sentences(setbacks([old, old, new])) == [
        "torch.a is left out on 2 shapes: a newer run found it incorrect.",
        "torch.b is compared by older times on 1 shape: a newer run has none (failed: boom).",
    ]


def test_runs_of_which_a_part_is_ranked_are_given_the_setbacks_of_all():
    assert all(isinstance(record, Ok) for record in OLD)
    known = setbacks([OLD, WRONG])
    older, newer = Standings([OLD], known=known), Standings([WRONG], known=known)
    assert "torch.sdpa" not in next(iter(older.overall.values())).ranked
    assert setback_sentences(older.setbacks) == setback_sentences(newer.setbacks) == [LEFT_OUT]
