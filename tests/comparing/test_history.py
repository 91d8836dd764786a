"""Series of cells over commits: against the anchors, per machine, in the order of the history."""

from __future__ import annotations

from math import exp, log

import msgspec
import numpy as np
import pytest
from record_factory import CPU, history_file, ok, unsupported, workload

from attnbench.comparing import history
from attnbench.comparing.history import (
    CommitPoint,
    CommitSeries,
    HistoryFile,
    Key,
    Trend,
    _rows,
    closing,
    find_changes,
    gather,
)

NAMES = ("anchor.matmul", "anchor.copy")


def source(commit: str, time: float, machine: float = 1.0, created: str = "", **fields) -> HistoryFile:
    """A run whose machine is `machine` times as slow as usual."""
    environment = msgspec.structs.replace(CPU, commit=commit, **fields)
    cell = ok("torch.sdpa", [time * machine] * 3, environment=environment)
    anchors = [
        ok(name, [ns * machine] * 3, environment=environment) for name, ns in zip(NAMES, (1e5, 4e5), strict=True)
    ]
    return history_file(created or f"2026-01-01T00:00:{ord(commit[-1]) if commit else 0:02d}", [cell, *anchors])


def test_a_point_has_the_date_of_its_record_and_not_of_its_file():
    """A cell that `--resume` added in June to a file of January is newer than a run of March."""
    january, march = source("", 1e6, created="2026-01-01"), source("", 2e6, created="2026-03-01")
    dates = ("2026-06-01",) * len(january.run.records)
    resumed = HistoryFile(msgspec.structs.replace(january.run, dates=dates))
    (series,), _ = gather([resumed, march])
    assert [point.created for point in series.points] == ["2026-03-01", "2026-06-01"]


def test_the_value_is_the_ratio_to_the_anchors_whatever_the_machine_does():
    (series,), excluded = gather([source("a", 1e6), source("b", 1e6, machine=3.0), source("c", 2e6, machine=0.5)])
    assert [point.value for point in series.points] == pytest.approx([log(5), log(5), log(10)])
    assert excluded == []


def test_order_is_that_of_the_history_else_of_time():
    runs = [source("a", 1e6, created="3"), source("b", 2e6, created="2"), source("c", 3e6, created="1")]
    (by_time,), _ = gather(runs)
    assert [point.commit for point in by_time.points] == ["c", "b", "a"]
    (by_commit,), _ = gather(runs, {"b": 0, "a": 7, "c": 9})
    assert [point.commit for point in by_commit.points] == ["b", "a", "c"]
    (half_known,), _ = gather(runs, {"b": 0, "a": 7})
    assert [point.commit for point in half_known.points] == ["c", "b", "a"]


@pytest.mark.parametrize("per_run", [False, True])
def test_a_run_without_a_place_in_git_leaves_the_others_in_order(per_run: bool):
    runs = [source(commit, 1e6, created=day) for commit, day in [*zip("abcd", "1246", strict=True), ("a", "8")]]
    order = {commit: place for place, commit in enumerate("abcd")}
    for lost in ("d+dirty", "", "e"):
        between, last = source(lost, 2e6, created="5"), source(lost, 3e6, created="9")
        (series,), _ = gather([between, *runs, last], order, per_run=True)
        assert [point.created for point in series.points] == ["1", "8", "2", "4", "5", "6", "9"]
        (series,), _ = gather([between, *runs], order, per_run=per_run)
        known = [point.commit for point in series.points if point.commit in order]
        assert known == sorted(known)
        assert series.points[-2].created == "5"


def test_runs_of_one_commit_are_one_point_and_a_run_without_is_its_own():
    runs = [source("a", time, created=str(number)) for number, time in enumerate((1e6, 9e6, 1.1e6))]
    runs += [source("", 2e6, created="7"), source("", 2e6, created="8"), source("", 2e6, created="8")]
    (series,), _ = gather(runs)
    assert [(point.commit, point.runs) for point in series.points] == [("a", 3), ("", 1), ("", 1)]
    assert exp(series.points[0].value) == pytest.approx(5.5)
    assert series.points[0].created == "0"


def test_two_runs_of_one_second_are_two_and_a_baseline_is_its_run():
    runs = [source("a", time, created="7") for time in (1e6, 3e6, 3e6)]
    (series,), _ = gather(runs, per_run=True)
    assert [exp(point.value) for point in series.points] == pytest.approx([5, 15])


def test_a_run_with_uncommitted_changes_stands_for_no_commit():
    (series,), _ = gather([source("a", 1e6, created="1"), source("a+dirty", 2e6, created="2")], {"a": 0})
    assert [(point.commit, point.runs) for point in series.points] == [("a", 1), ("", 1)]
    assert _rows([Trend(series, ())])[0]["commits"] == "1 + 1 run"
    (without,), _ = gather([source("", time, created=str(time)) for time in (1e6, 2e6)])
    assert _rows([Trend(without, ())])[0]["commits"] == "2 runs"
    assert closing([Trend(without, ())], lambda trend, change: "").startswith("Too few runs to find a step: 2 at most")


def test_functions_of_one_name_and_two_files_are_two_series():
    def of(place: str, time: float) -> HistoryFile:
        made = source("a", time, created=f"{place} {time}")
        return HistoryFile(made.run, {"torch.sdpa": place} if place else {})

    spelled = [of("alice.py", 1e6), of("./alice.py", 2e6), of("/home/me/alice.py", 3e6), of("", 4e6)]
    (series,), _ = gather(spelled, per_run=True)
    assert len(series.points) == 4
    apart, _ = gather([*spelled, of("bob.py", 5e6)], per_run=True)
    assert sorted((one.key.source, len(one.points)) for one in apart) == [("", 1), ("alice.py", 3), ("bob.py", 1)]
    assert {row["source"] for row in _rows([Trend(one, ()) for one in apart])} == {"", "alice.py", "bob.py"}


def test_another_fingerprint_or_clock_starts_another_series():
    runs = [source("a", 1e6), source("b", 1e6), source("c", 1e6, packages={"torch": "2.14"})]
    cell, *anchors = source("d", 1e6).run.records
    assert cell.time is not None
    other_clock = msgspec.structs.replace(cell, time=msgspec.structs.replace(cell.time, clock="cpu"))
    runs.append(history_file("9", [other_clock, *anchors]))
    series, _ = gather(runs)
    assert sorted(len(one.points) for one in series) == [1, 1, 2]
    assert len({one.key.fingerprint for one in series}) == 2


def test_another_kind_of_processor_starts_another_series():
    """Take an unknown kind for the only known one; of several it may be any."""
    old, new = "GenuineIntel 6-85", "GenuineIntel 6-207"
    runs = [source(commit, 1e6, processor=old) for commit in "abc"] + [source("d", 1e6, processor="")]
    (series,), _ = gather(runs)
    assert (series.key.processor, len(series.points)) == (old, 4)
    apart, _ = gather([*runs, *(source(commit, 2e6, processor=new) for commit in "ef")])
    assert {one.key.processor: len(one.points) for one in apart} == {old: 3, "": 1, new: 2}
    machines = {row["machine"].partition(f"{CPU.fingerprint} ")[2] for row in _rows([Trend(one, ()) for one in apart])}
    assert machines == {old, new, "unknown processor"}


def test_another_attnbench_starts_another_series():
    """What it calls a time may be something else: a step there is none of the code."""
    runs = [source(commit, 1e6, harness="0.1.0") for commit in "ab"]
    runs += [source(commit, 2e6, harness="0.1.0 (estimator 2)") for commit in "cd"]
    series, _ = gather(runs)
    assert [{point.commit for point in one.points} for one in series] == [{"a", "b"}, {"c", "d"}]


def test_anchors_from_another_framework_start_another_series():
    runs = [source("a", 1e6), source("b", 1e6)]
    cell, *anchors = runs[1].run.records
    jax = msgspec.structs.replace(CPU, commit="b", packages={"jax": "0.10"})
    runs[1] = history_file("2", [cell, *(msgspec.structs.replace(one, environment=jax) for one in anchors)])
    series, _ = gather(runs)
    assert [len(one.points) for one in series] == [1, 1]


def test_missing_anchors_exclude_with_a_reason():
    cell, matmul, copy = source("a", 1e6).run.records
    elsewhere = msgspec.structs.replace(copy, workload=workload(256))
    series, excluded = gather([history_file("1", [cell, matmul, elsewhere, unsupported("torch.fa3", "no")])])
    assert series == []
    ((cell_id, created, reason),) = [(one.cell, one.created, one.reason) for one in excluded]
    assert (cell_id, created) == (cell.cell.id, "1")
    assert reason == "its run has no anchor.copy for this workload"
    _, excluded = gather([history_file("1", [cell])])
    assert excluded[0].reason == "its run has no anchor.matmul and no anchor.copy for this workload"


def series_of(values: np.ndarray) -> CommitSeries:
    points = tuple(
        CommitPoint(commit=f"c{n:02d}", created=str(n), value=float(value)) for n, value in enumerate(values)
    )
    key = Key(implementation="x", workload="w", fingerprint="f", clock="wall", anchors="f wall")
    return CommitSeries(key=key, workload=workload(), machine="m", points=points)


def stepped(ratio: float, at: int = 12) -> np.ndarray:
    values = 0.01 * np.random.default_rng(0).standard_normal(24)
    values[at:] += log(ratio)
    return values


@pytest.mark.parametrize("ratio,direction", [(1.08, "slower"), (1 / 1.08, "faster")])
def test_a_change_has_a_direction_a_size_and_suspects(ratio: float, direction: str):
    pytest.importorskip("ruptures")
    asked = []

    def between(old: str, new: str) -> list[tuple[str, str]]:
        asked.append((old, new))
        return [("s1", "first"), ("c12", "second")]

    (change,) = find_changes(series_of(stepped(ratio)), between)
    assert change.direction == direction
    assert change.ratio == pytest.approx(ratio, rel=0.015)
    assert (change.position, change.old, change.new) == (12, "c11", "c12")
    assert asked == [("c11", "c12")]
    assert [subject for _, subject in change.suspects] == ["first", "second"]


def test_without_git_there_are_no_suspects():
    pytest.importorskip("ruptures")
    (change,) = find_changes(series_of(stepped(1.08)))
    assert (change.old, change.new, change.suspects) == ("c11", "c12", ())


def test_without_the_detector_there_are_no_changes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history, "detector_missing", lambda: "not installed")
    assert find_changes(series_of(stepped(1.5))) == ()
