"""Anchors measure how fast a machine was in one sitting: those of another sitting judge nothing."""

from __future__ import annotations

from math import exp
from pathlib import Path

import pytest
from msgspec.structs import replace
from record_factory import history_file, noisy, ok, workload

from attnbench.comparing.baselines import save
from attnbench.comparing.gate_cases import judge
from attnbench.comparing.history import gather
from attnbench.comparing.stored import SAME_MEASUREMENT, cases_of_runs, check_comparable
from attnbench.comparison import Case
from attnbench.results.run_file import RunWriter, new_header, read_run
from attnbench.spec import Ok, Record, VerifiedAt

MORNING, EVENING = "2026-01-01T08:00:00.000000Z", "2026-01-01T20:00:00.000000Z"


def at(sitting: str, name: str, median: float, seed: int = 1) -> Ok:
    record = ok(name, noisy(median, seed), verified_at=VerifiedAt(shape={"size": 512}, share=1.0))
    assert record.time is not None
    return replace(record, time=replace(record.time, sitting=sitting))


def anchors(sitting: str, machine: float = 1.0, seed: int = 5) -> list[Ok]:
    medians = {"anchor.matmul": 2e6, "anchor.copy": 5e6}
    return [at(sitting, name, machine * median, seed + n) for n, (name, median) in enumerate(medians.items())]


def first() -> list[Record]:
    return [at(MORNING, "torch.x", 1e6), *anchors(MORNING)]


def second(machine: float = 0.75) -> list[Record]:
    """What a resumed run adds, on a machine that has become quieter."""
    return [at(EVENING, "torch.y", 2e6 * machine, 3), *anchors(EVENING, machine, 7)]


@pytest.fixture
def resumed(tmp_path: Path) -> list[Record]:
    writer = RunWriter(tmp_path / "r.jsonl", new_header("0", "s"))
    writer.write(first())
    writer.write(second())
    return list(read_run(writer.path).records)


def only(cases: list[Case]) -> Case:
    (one,) = cases
    return one


def test_a_file_keeps_the_anchors_of_all_its_sittings(resumed: list[Record]):
    kept = [(one.implementation, one.time.sitting) for one in resumed if one.time is not None]
    names = ("anchor.matmul", "anchor.copy")
    assert kept == [
        ("torch.x", MORNING), *((name, MORNING) for name in names),
        ("torch.y", EVENING), *((name, EVENING) for name in names),
    ]  # fmt: skip


def test_anchors_of_one_sitting_that_are_written_again_replace_each_other(tmp_path: Path):
    writer = RunWriter(tmp_path / "r.jsonl", new_header("0", "s"))
    writer.write(anchors(MORNING))
    writer.write(anchors(MORNING, 2.0))
    assert list(read_run(writer.path).records) == anchors(MORNING, 2.0)


def test_a_cell_is_itself_after_the_run_was_resumed(resumed: list[Record]):
    found = {one.implementation: one for one in cases_of_runs(first(), resumed)}
    assert found["torch.x"].status == "pass"
    assert found["torch.x"].first is not None
    assert (found["torch.x"].first.reason, found["torch.x"].first.ratio) == (SAME_MEASUREMENT, 1.0)


def test_a_measurement_is_itself_whatever_anchors_there_are():
    bare, other = [first()[0]], [first()[0], *anchors(EVENING)]
    for a, b in ((bare, bare), (bare, other), (other, first())):
        assert only(cases_of_runs(a, b)).status == "pass"


def test_short_times_that_agree_by_chance_are_two_measurements():
    """Three rounds of a clock that ticks every 32 ns."""
    ticks = [5120.0, 5152.0, 5120.0]
    a, b = ok("torch.x", ticks), ok("torch.x", ticks)
    assert only(cases_of_runs([a, *anchors("")], [b, *anchors("", 2.0, 9)])).reason != SAME_MEASUREMENT


def test_each_cell_is_judged_by_the_anchors_of_its_own_sitting(resumed: list[Record]):
    """The machine took 1.5 times as long throughout when all was measured again: nothing changed."""
    again = "2026-01-02T08:00:00.000000Z"
    later = [at(again, "torch.x", 1.5e6, 11), at(again, "torch.y", 3e6, 12), *anchors(again, 1.5, 13)]
    for case in cases_of_runs(resumed, later):
        assert case.status == "pass", case.reason
        assert case.first is not None
        assert case.first.ratio == pytest.approx(1.0, rel=0.03)


def test_without_anchors_of_its_sitting_nothing_is_compared():
    """A false "slower" of 1.33 before: the anchors of a quieter evening."""
    again = "2026-01-02T08:00:00.000000Z"
    orphan = [at(MORNING, "torch.x", 1e6), *anchors(EVENING, 0.75)]
    for old, new, run in (
        (orphan, [at(again, "torch.x", 1e6, 11), *anchors(again, 1.0, 13)], "baseline"),
        ([at(again, "torch.x", 1e6, 11), *anchors(again, 1.0, 13)], orphan, "current"),
    ):
        case = only(cases_of_runs(old, new))
        assert case.status == "inconclusive"
        assert case.reason == f"the {run} run has no anchors of its sitting: measure it again"
        assert case.first is not None
        assert case.first.verdict is None
        passed = [at(again, "torch.z", 1e6), *anchors(again)]
        assert judge(cases_of_runs([*old, *passed], [*new, *passed]), ()).outcome == "inconclusive"


def test_the_turn_of_a_heavy_cell_needs_anchors_of_that_turn():
    turn = f"{MORNING}+1"
    light = [at(MORNING, "torch.x", 1e6), *anchors(MORNING)]
    heavy = [at(turn, "torch.y", 4e6, 2), *anchors(turn, 1.1, 9)]
    ((x, y), excluded) = gather([history_file("1", [*light, *heavy])])
    assert excluded == []
    assert exp(y.points[0].value - x.points[0].value) == pytest.approx(4 / 1.1, rel=0.02)
    _, excluded = gather([history_file("1", [*light, heavy[0]])])
    assert [one.reason for one in excluded] == ["its run has no anchors of its sitting"]


def test_history_takes_each_point_from_its_own_sitting(resumed: list[Record]):
    series, excluded = gather([history_file("1", resumed)])
    values = {one.key.implementation: exp(one.points[0].value) for one in series}
    assert excluded == []
    anchor = (2e6 * 5e6) ** 0.5
    assert values == pytest.approx({"torch.x": 1e6 / anchor, "torch.y": 2e6 / anchor}, rel=0.02)


def test_a_baseline_holds_the_anchors_of_its_sitting_or_is_not_made(resumed: list[Record], tmp_path: Path):
    done = save(resumed, tmp_path / "kept")
    for one in done.written:
        assert one.record.time is not None
        assert [anchor.time and anchor.time.sitting for anchor in one.anchors] == [one.record.time.sitting] * 2
    assert len(done.written) == 2
    orphan = save([resumed[0], *anchors(EVENING)], tmp_path / "none")
    assert orphan.written == ()
    assert [reason for _, reason in orphan.skipped] == [
        "its run has no anchors of its sitting (a matrix product and a copy) for this workload"
    ]


def test_machines_are_compared_with_the_anchors_of_the_sitting_only(resumed: list[Record]):
    """The file was resumed on another machine for other cells: what the first sitting holds is still comparable."""
    moved = [
        replace(one, environment=replace(one.environment, device_name="Other CPU"))
        if one.time is not None and one.environment is not None and one.time.sitting == EVENING else one
        for one in resumed
    ]  # fmt: skip
    check_comparable(first(), moved)
    elsewhere = [replace(one, workload=workload(256)) for one in moved]
    check_comparable(first(), elsewhere)
