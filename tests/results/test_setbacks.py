"""What a newer run says of an older time: incorrect, and the time is left out; lost, and it is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs
from record_factory import CPU, incorrect, noisy, ok, recommend, workload

from attnbench.results import run_file
from attnbench.results.run_file import RunWriter, new_header, read_run
from attnbench.results.sentences import answer, setback_sentences, speedups
from attnbench.results.standings import Setback, Standings, by_date, setbacks
from attnbench.spec import ONLY_TIMED, Environment, Failed, Ok, OutOfMemory, Record, Timeout, Unsupported

MON, TUE, WED = (f"2026-01-0{day}T10:00:00+00:00" for day in (5, 6, 7))
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

    def test_a_check_without_timing_leaves_what_a_timed_run_cleared(self):
        timed_wrong = [incorrect("torch.sdpa", f"{ONLY_TIMED} output, right when checked")]
        assert setbacks([OLD, timed_wrong, OLD[:1]]) == []
        assert setbacks([OLD, timed_wrong, OLD[:1], [ok("torch.sdpa")]]) == []
        assert setbacks([OLD, OLD[:1], timed_wrong, [ok("torch.sdpa")]]) == [
            Setback(OLD[0], timed_wrong[0]), Setback(OLD[0], timed_wrong[0])
        ]  # fmt: skip


OTHER_PLACES = pytest.mark.parametrize("there", [
    structs.replace(CPU, packages={"torch": "2.14.0"}),
    structs.replace(CPU, threads=1),
    structs.replace(CPU, processor="Intel 6 143"),
], ids=["versions", "threads", "processor"])  # fmt: skip


class TestPlaces:
    """A kernel may be right with one version, number of threads or processor of a device and wrong with another."""

    HERE = structs.replace(CPU, processor="Intel 6 85")

    def of(self, record: Record, environment: Environment) -> Record:
        return structs.replace(record, environment=environment)

    @OTHER_PLACES
    def test_a_right_record_of_another_place_does_not_clear_this_one(self, there: Environment):
        old, wrong = self.of(OLD[0], self.HERE), self.of(WRONG[0], self.HERE)
        right = self.of(OLD[0], structs.replace(there, processor=there.processor or self.HERE.processor))
        assert setbacks([[old], [wrong], [right]]) == [Setback(old, wrong, right_elsewhere=True)]
        assert setbacks([[old], [wrong], [right], [old]]) == []
        assert setbacks([[old], [right], [wrong]]) == [Setback(old, wrong), Setback(right, wrong)]

    @OTHER_PLACES
    def test_times_of_the_place_where_it_is_right_count(self, there: Environment):
        newest = [self.of(record, there) for record in OLD]
        standings = Standings([OLD, WRONG, newest])
        assert [list(one.ranked) for one in standings.overall.values()] == [["torch.sdpa", "torch.eager", "torch.math"]]
        assert answer(standings).startswith(
            "torch.sdpa is left out on 1 shape with the versions, threads and processor of a newer run that found it "
            "incorrect."
        )

    def test_a_package_that_only_one_run_has_makes_no_difference(self):
        more = structs.replace(CPU, packages=CPU.packages | {"flash-attn": "2.8"})
        assert setbacks([OLD, WRONG[:1], [self.of(OLD[0], more)]]) == []

    def test_a_time_of_an_unknown_processor_counts_on_none_on_which_it_is_wrong(self):
        here, there = (structs.replace(CPU, processor=kind) for kind in ("Intel 6 85", "Intel 6 143"))
        wrong, right = self.of(WRONG[0], here), self.of(OLD[0], there)
        assert setbacks([OLD[:1], [wrong], [right]]) == [Setback(OLD[0], wrong, right_elsewhere=True)]
        assert setbacks([[right], [wrong], [right]]) == []


class TestDates:
    """A file that was resumed holds records that are newer than those of files begun after it."""

    @pytest.fixture
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Return one file that was begun on Monday and resumed on Wednesday, and one of Tuesday."""
        first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
        monkeypatch.setattr(run_file, "_now", lambda: WED)
        elsewhere = [ok("torch.eager", noisy(1e6, 1), workload(256))]
        for path, date, records in ((first, MON, elsewhere), (second, TUE, OLD), (first, "", WRONG[:1])):
            writer = RunWriter(path, structs.replace(new_header("0", "s"), created=date) if date else None)
            writer.write(records)
            writer.close()
        return [first, second]

    def test_what_a_resumed_run_found_is_newer(self, files: list[Path]):
        first, second = map(read_run, files)
        assert (first.dates, second.dates) == ((MON, WED), (TUE, TUE, TUE))
        assert setbacks([first.records, second.records]) == []
        (found,) = setbacks([by_date([*first.dated, *second.dated])])
        assert (found.record, found.is_wrong) == (second.records[0], True)

    def test_choose_and_the_page_leave_it_out(self, files: list[Path]):
        from attnbench.choosing.choose import choose
        from attnbench.cli.choose import read_sources

        found = choose(read_sources([str(path) for path in files]))
        assert [entry.use.implementation for entry in found.policy.entries if entry.at.q_len == 128] == ["torch.eager"]
        assert setback_sentences(found.setbacks) == [LEFT_OUT]
        for needed in ("altair", "jinja2", "vl_convert"):
            pytest.importorskip(needed)
        from attnbench.report.html.page import compose
        from attnbench.results.run_file import NamedRun

        (part,) = compose([NamedRun(path.name, read_run(path)) for path in files]).parts
        assert LEFT_OUT in part.wrong

    def test_a_file_without_dates_has_that_of_its_header(self, files: list[Path]):
        run = structs.replace(read_run(files[0]), dates=())
        assert [date for date, _ in run.dated] == [MON, MON]


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
