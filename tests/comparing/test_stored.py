"""Comparisons of stored runs: by their anchors, only on one machine, and never on bare times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from record_factory import CPU, incorrect, noisy, ok, timing, unsupported, workload

from attnbench.comparing.baselines import save
from attnbench.comparing.gate_cases import OnInconclusive, judge
from attnbench.comparing.stored import cases_of_runs, check_comparable, compare_records, gate_stored
from attnbench.comparison import Case, Comparison
from attnbench.errors import UsageError
from attnbench.results.run_file import RunWriter, new_header
from attnbench.spec import Environment, Failed, Incorrect, Memory, Ok, Record, Unsupported, VerifiedAt

SHAPES = {"anchor.matmul": {"size": 512}, "anchor.copy": {"bytes": 1 << 25}}


def anchors(machine: float = 1.0, seed: int = 0, copy: float = 1.0) -> list[Ok]:
    """Both anchors on a machine that takes `machine` times as long; `copy` slows the memory-bound one alone."""
    medians = {"anchor.matmul": 2e6 * machine, "anchor.copy": 5e6 * machine * copy}
    return [
        ok(name, noisy(median, seed + i), verified_at=VerifiedAt(shape=SHAPES[name], share=1.0))
        for i, (name, median) in enumerate(medians.items())
    ]


def cell(median: float = 1e6, seed: int = 10, name: str = "torch.x", **fields: object) -> Ok:
    return ok(name, noisy(median, seed), **fields)


def compared(factor: float, machine: float = 1.0, copy: float = 1.0, **fields: float) -> Comparison:
    b = cell(1e6 * factor * machine, seed=20)
    return compare_records(cell(), b, anchors(), anchors(machine, 30, copy), **fields)


@pytest.mark.parametrize(
    "factor, verdict", [(1.0, "same"), (1.03, "same"), (1.09, "slower"), (0.9, "faster"), (2.0, "slower")]
)
@pytest.mark.parametrize("machine", [1.0, 1.4])
def test_verdict_is_relative_to_the_anchors(factor: float, verdict: str, machine: float):
    """A machine 40 % slower slows the anchors as well."""
    found = compared(factor, machine)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(factor, rel=0.02)
    assert found.interval is not None
    assert found.interval[0] < factor < found.interval[1]
    assert set(found.estimates) == set(SHAPES)


def test_anchors_that_disagree_decide_nothing():
    assert compared(1.12, copy=1.12).verdict == "inconclusive"
    assert compared(0.88, copy=0.88).verdict == "inconclusive"


@pytest.mark.parametrize(
    "factor, verdict, mirrored",
    [(1.12, "slower", "faster"), (1.0, "same", "same"), (1.055, "inconclusive", "inconclusive")],
)
def test_swapping_the_runs_mirrors_the_verdict(factor: float, verdict: str, mirrored: str):
    a, b, of_a, of_b = cell(), cell(factor * 1.2e6, 20), anchors(), anchors(1.2, 30, 0.96)
    there, back = compare_records(a, b, of_a, of_b), compare_records(b, a, of_b, of_a)
    assert (there.verdict, back.verdict) == (verdict, mirrored)
    assert there.ratio == pytest.approx(1 / back.ratio)  # type: ignore[operator]
    assert there.interval == pytest.approx(tuple(1 / bound for bound in reversed(back.interval or ())))


def test_a_floor_may_be_raised():
    assert compared(1.12, floor=0.15).verdict == "same"
    assert compared(1.20, floor=0.15).verdict == "slower"


def test_times_are_left_out_and_the_rest_survives_json():
    found = compared(1.09)
    assert found.record_a is not None
    assert found.record_a.time is None
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


@pytest.mark.parametrize(
    "b, of_b, reason",
    [
        (cell(time=None), anchors(), "verified but not timed in the current run"),
        (cell(), anchors()[:1], "the current run has no times of anchor.copy"),
        (cell(time=timing(noisy(1e6, 3), clock="kernel")), anchors(), "torch.x was measured differently"),
        (cell(), [replace(one, environment=replace(CPU, framework="jax")) for one in anchors()], "jax"),
    ],
)
def test_what_cannot_be_compared_says_why(b: Ok, of_b: list[Ok], reason: str):
    found = compare_records(cell(), b, anchors(), of_b)
    assert found.verdict is None
    assert reason in found.reason


def shaken(record: Ok, half: float = 0.11) -> Ok:
    """The same times, known less well."""
    assert record.time is not None
    middle = record.time.median_ns
    return replace(record, time=replace(record.time, ci95_ns=((1 - half) * middle, (1 + half) * middle)))


@pytest.mark.parametrize(
    "factor, verdict", [(2.0, "slower"), (0.5, "faster"), (1.0, "inconclusive"), (1.055, "inconclusive")]
)
def test_shaky_times_only_keep_nothing_changed_from_being_said(factor: float, verdict: str):
    of_a, of_b = ([shaken(one) for one in anchors(seed=seed)] for seed in (0, 30))
    found = compare_records(cell(), cell(1e6 * factor, 20), of_a, of_b)
    assert found.verdict == verdict
    assert ("the time of anchor.matmul is known only to ±11%" in found.reason) == (verdict == "inconclusive")


def test_a_wide_interval_that_clears_the_floor_is_a_verdict_and_one_that_does_not_is_none():
    wide = ok("torch.x", noisy(2e6, 20, spread=0.8))
    found = compare_records(cell(), wide, anchors(), anchors(1.0, 30))
    assert found.interval is not None
    assert found.interval[1] / found.interval[0] > 1.4
    assert found.interval[0] > 1.05
    assert found.verdict == "slower"
    touching = compare_records(cell(), ok("torch.x", noisy(1.2e6, 20, spread=0.8)), anchors(), anchors(1.0, 30))
    assert touching.verdict == "inconclusive"


@pytest.mark.parametrize("record", [cell(), shaken(cell(), 0.6), ok("torch.x", noisy(1e6, 3, spread=1.0))])
def test_one_measurement_against_itself_is_the_same_in_either_order(record: Ok):
    assert record.time is not None
    kept = replace(record, time=timing([round(x, 1) for x in record.time.samples_ns]))
    for a, b in ((record, record), (record, kept), (kept, record)):
        found = compare_records(a, b, anchors(), anchors())
        assert (found.verdict, found.ratio, found.interval) == ("same", 1.0, (1.0, 1.0))
    assert judge(cases_of_runs([record, *anchors()], [record, *anchors()]), ()).outcome == "pass"


def test_an_inconclusive_case_says_what_was_in_the_way():
    shaky = only(cases_of_runs([cell(), *anchors()], [shaken(cell(1e6, 20)), *anchors(1.0, 30)]))
    assert (shaky.status, shaky.reason) == ("inconclusive", shaky.first and shaky.first.reason)
    assert shaky.reason.startswith("the time of torch.x is known only to ±11%: measure both again")
    near = only(cases_of_runs([cell(), *anchors()], [cell(1.12e6, 20), *anchors(1.0, 30, copy=1.12)]))
    assert near.reason.startswith("could have seen ")
    short = ok("torch.x", None, time=replace(timing([1e6, 3e6]), ci95_ns=(1.9e6, 2.1e6)))
    assert "vary too much for a verdict: measure both again" in only(runs([short])).reason


def runs(current: list[Record], baseline: list[Record] | None = None) -> list[Case]:
    old = [cell()] if baseline is None else baseline
    return cases_of_runs([*old, *anchors()], [*current, *anchors(1.1, 30)])


def only(cases: list[Case]) -> Case:
    (one,) = cases
    return one


def test_a_slower_stored_run_is_a_regression():
    found = only(runs([cell(1.12 * 1.1e6, 20)]))
    assert found.status == "regression"
    assert "by anchor.matmul and" in found.reason
    assert found.first is not None
    assert found.p_holm == max(one.p_slower for one in found.first.estimates.values()) < 0.01
    assert len({one.p_slower for one in found.first.estimates.values()}) == 2
    assert judge([found], ()).outcome == "fail"


def test_an_unchanged_or_better_one_passes():
    assert only(runs([cell(1.1e6, 20)])).status == "pass"
    assert only(runs([cell(0.9e6, 20)])).status == "improved"


def test_numbers_and_memory_are_gated_between_runs_too():
    assert only(runs([incorrect("torch.x", "off")])).status == "wrong"
    light, heavy = (Memory(peak_bytes=size) for size in (10**7, 2 * 10**7))
    found = only(runs([cell(1.1e6, 20, memory=heavy)], [cell(memory=light)]))
    assert (found.status, found.memory) == ("memory", (10**7, 2 * 10**7))


def test_cells_of_one_run_only():
    found = runs([cell(1.1e6, 20), cell(name="torch.new")], [cell(), cell(name="torch.old")])
    told = {one.implementation: (one.status, one.reason) for one in found}
    assert told["torch.new"] == ("no_baseline", "not in the baseline run")
    assert told["torch.old"][0] == "missing"
    assert "ok in the baseline, but not in the current run: measure it, or remove" in told["torch.old"][1]
    assert told["torch.x"][0] == "pass"


@pytest.mark.parametrize("asked, outcome", [("inconclusive", "inconclusive"), ("pass", "pass"), ("fail", "fail")])
def test_what_was_dropped_is_no_pass(asked: OnInconclusive, outcome: str):
    judgement = judge(runs([cell(1.1e6, 20)], [cell(), cell(name="torch.old")]), (), asked)
    assert judgement.outcome == outcome
    assert "1 case of the baseline missing in the current run" in judgement.warnings
    refused_before = runs([cell(1.1e6, 20)], [cell(), unsupported("torch.old", "no")])
    assert judge(refused_before, ()).outcome == "pass"


def test_refused_on_both_sides_is_not_measured():
    assert only(runs([unsupported("torch.x", "no")], [unsupported("torch.x", "no")])).status == "not_measured"
    assert only(runs([cell()], [unsupported("torch.x", "no")])).status == "no_baseline"


def test_anchors_of_another_workload_do_not_count():
    other = [replace(one, workload=workload(256)) for one in anchors()]
    found = only(cases_of_runs([cell(), *other], [cell(), *other]))
    assert found.status == "inconclusive"
    assert "measure it again" in found.reason


EVENTS = timing(noisy(1.5e6, 20), clock="events")


@pytest.mark.parametrize(
    "b, of_b, told",
    [
        (cell(time=EVENTS), anchors(1.0, 30), "was measured differently in the two runs (wall and events)"),
        (cell(1.5e6, 20), anchors(1.0, 30)[:1], "the current run has no times of anchor.copy"),
        (cell(time=None), anchors(1.0, 30), "verified but not timed in the current run"),
    ],
)
def test_what_both_runs_hold_and_cannot_be_compared_is_no_pass(b: Ok, of_b: list[Ok], told: str):
    found = cases_of_runs([cell(), cell(name="torch.y"), *anchors()], [b, cell(1e6, 21, "torch.y"), *of_b])
    assert found[0].status == "inconclusive"
    assert told in found[0].reason
    assert judge(found, ()).outcome != "pass"


def test_what_was_never_timed_has_no_baseline_or_was_not_measured():
    assert only(runs([cell(1.1e6, 20)], [cell(time=None)])).status == "no_baseline"
    assert only(runs([cell(time=None)], [cell(time=None)])).status == "not_measured"


@pytest.mark.parametrize("factor, status", [(1.5, "regression"), (1.0, "pass")])
def test_times_of_two_clocks_are_compared_by_the_one_that_both_hold(factor: float, status: str):
    both = cell(time=EVENTS, also={"wall": timing(noisy(1e6 * factor, 20))})
    for a, b in ((cell(), both), (both, cell(1e6 * factor**2, 21))):
        found = only(cases_of_runs([a, *anchors()], [b, *anchors(1.0, 30)]))
        assert found.status == status, found.reason
        assert found.first is not None
        assert found.first.ratio == pytest.approx(factor, rel=0.02)


def test_wrong_numbers_count_without_a_baseline():
    refused, off = unsupported("torch.x", "no"), incorrect("torch.x", "off")
    assert only(runs([off], [refused])).status == "wrong"
    assert only(runs([off], [])).status == "wrong"
    assert only(runs([off], [off])).status == "wrong"


def test_floors_per_case_only_upward():
    old, new = [cell(), *anchors()], [cell(1.12 * 1.1e6, 20), *anchors(1.1, 30)]
    assert only(cases_of_runs(old, new, lambda implementation, on: 0.2)).status == "pass"
    lowered = only(cases_of_runs(old, new, lambda implementation, on: 0.0))
    assert lowered.first is not None
    assert lowered.first.floor == 0.05


JAX = Environment(device="cpu", device_name="Test CPU 9000", framework="jax", packages={"jax": "0.10"})
OTHER = replace(CPU, device_name="Other CPU")
CELL = f"torch.x/{workload().id}"


def record(name: str = "torch.x", environment: Environment | None = CPU) -> Ok:
    return ok(name, noisy(1e6, 3), environment=environment)


def run(environment: Environment | None = CPU, anchors: Environment | None = CPU) -> list[Record]:
    return [record(environment=environment), *(record(f"anchor.{name}", anchors) for name in ("matmul", "copy"))]


def refusal(baseline: list[Record], current: list[Record]) -> str:
    with pytest.raises(UsageError) as error:
        check_comparable(baseline, current)
    assert "attnbench baseline save" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"cpu": "Other CPU"}, "cpu is unknown in the baseline and Other CPU in the current run"),
        (
            {"harness": "0.1.0 (estimator 2)"},
            "harness is unknown in the baseline and 0.1.0 (estimator 2) in the current",
        ),
        ({"threads": 1}, "threads is 2 in the baseline and 1 in the current run"),
        ({"capability": (9, 0)}, "capability is unknown in the baseline and 9.0 in the current run"),
        ({"packages": {"torch": "2.12.0"}}, "package torch is 2.13.0 in the baseline and 2.12.0 in the current run"),
        ({"packages": {"torch": "2.13.0", "x": "1"}}, "package x is absent in the baseline and 1 in the current run"),
    ],
)
def test_other_machines_are_refused_by_name(changed: dict[str, object], told: str):
    there = replace(CPU, **changed)
    message = refusal(run(), run(there, there))
    assert f"for {CELL}, {told}" in message
    assert "device_name" not in message


def test_soft_facts_and_other_frameworks_do_not_matter():
    busy = replace(CPU, clocks={"load": 4.0}, commit="abc", variables={"OMP_NUM_THREADS": "2"})
    check_comparable(run(), run(busy, busy))
    check_comparable(run(anchors=JAX), run(anchors=JAX))
    check_comparable(run(), [record("jax.x", JAX)])


def test_one_record_of_another_machine_is_enough():
    sound = [record("torch.y"), *run()]
    moved = [record("torch.y"), record(environment=OTHER)]
    assert f"for {CELL}, device_name is Test CPU 9000 in the baseline and Other CPU" in refusal(sound, moved)
    assert f"for {CELL}, device_name is Other CPU in the baseline" in refusal(moved, sound)


def test_anchors_are_of_the_machine_they_stand_for():
    assert "the current run mixes machines: device_name of torch.x" in refusal(run(), run(anchors=OTHER))
    mixed = run(OTHER, CPU)
    assert "is Other CPU, but that of anchor.matmul beside it is Test CPU 9000" in refusal(mixed, mixed)
    slow_copy = [*run()[:2], record("anchor.copy", replace(CPU, threads=1))]
    assert "for anchor.copy/" in refusal(run(), slow_copy)


def test_what_nobody_knows_the_machine_of_is_refused():
    assert f"the environment of {CELL} in the baseline run is unknown" in refusal(run(None, None), run(None, None))
    assert f"the environment of {CELL} in the current run is unknown" in refusal(run(), run(None))
    assert "the environment of anchor.matmul" in refusal(run(), run(anchors=None))
    nameless = replace(CPU, device_name="")
    assert f"the device_name of {CELL}" in refusal(run(nameless, nameless), run(nameless, nameless))


def test_what_is_not_judged_need_not_be_known():
    check_comparable(run(), [replace(incorrect("torch.x", "no worker"), environment=None)])
    check_comparable(run(), [replace(unsupported("torch.x", "no"), environment=OTHER)])
    check_comparable(run(), [record("torch.new", None)])
    assert "device_name" in refusal(run(), [replace(incorrect("torch.x", "off"), environment=OTHER)])


def test_files_and_folders_are_checked_alike(tmp_path: Path):
    paths = {}
    for name, records in {"here": run(), "unknown": run(None, None), "mixed": run(CPU, OTHER)}.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        RunWriter(paths[name], new_header("0", "s")).write(records)
    save(run(), tmp_path / "kept")
    for baseline in (paths["here"], tmp_path / "kept"):
        assert gate_stored(baseline, paths["here"], lambda *case: 0.05, "inconclusive").outcome == "pass"
        for name, told in {"unknown": f"environment of {CELL}", "mixed": "mixes machines"}.items():
            with pytest.raises(UsageError, match=told):
                gate_stored(baseline, paths[name], lambda *case: 0.05, "inconclusive")


def written(path: Path, records: Sequence[Record]) -> Path:
    RunWriter(path, new_header("0", "s")).write(records)
    return path


def judged(baseline: Path, current: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the outcome of a gate, and the status and reason of each case of torch.x."""
    report = gate_stored(baseline, current, lambda *case: 0.05, "inconclusive")
    return report.outcome, [(one.status, one.reason) for one in report.cases if one.implementation == "torch.x"]


@pytest.mark.parametrize("kind", [Failed, Incorrect, Unsupported])
@pytest.mark.parametrize("beside", ["another framework", "older packages", "nothing"])
def test_a_worker_that_never_started_is_broken_against_a_file_and_against_a_folder(
    tmp_path: Path, kind: type[Failed | Incorrect | Unsupported], beside: str
):
    """Find the baseline of a record that names no environment by its cell, among those of this machine."""
    numpy = replace(CPU, framework="numpy", packages={"numpy": "2"}, threads=1)
    here = CPU if beside == "older packages" else numpy
    other = [replace(one, environment=here) for one in (cell(seed=11, name="numpy.x"), *anchors())]
    old = [*run(replace(CPU, packages={"torch": "2.12"}) if beside == "older packages" else CPU), other[0]]
    save(old, tmp_path / "kept")
    why = kind(implementation="torch.x", workload=workload(), reason="no worker could be started")
    current = written(tmp_path / "new.jsonl", [why, *(() if beside == "nothing" else other)])
    told = [("wrong", f"{why.status}: no worker could be started")]
    assert judged(tmp_path / "kept", current) == ("fail", told)
    if beside != "older packages":
        assert judged(written(tmp_path / "old.jsonl", old), current) == ("fail", told)


def test_a_record_without_environment_needs_a_baseline_of_this_machine_unless_it_is_incorrect(tmp_path: Path):
    save(run(OTHER), tmp_path / "kept")
    facts = {"implementation": "torch.x", "workload": workload(), "reason": "off"}
    found = {
        kind: judged(tmp_path / "kept", written(tmp_path / f"{kind.__name__}.jsonl", [kind(**facts), *anchors()]))
        for kind in (Failed, Incorrect, Unsupported)
    }
    assert found[Incorrect] == ("fail", [("wrong", "incorrect: off")])
    assert [status for status, _ in found[Failed][1]] == ["no_baseline"]
    assert found[Unsupported] == ("nothing", [])


def test_baselines_of_a_framework_that_the_run_lacks_are_missing(tmp_path: Path):
    save(run(), tmp_path / "kept")
    numpy = replace(CPU, framework="numpy", packages={"numpy": "2"}, threads=1)
    other = [replace(one, environment=numpy) for one in (cell(name="numpy.x"), *anchors())]
    _, found = judged(tmp_path / "kept", written(tmp_path / "new.jsonl", other))
    assert [status for status, _ in found] == ["missing"]


OLDER, NEWER = (replace(CPU, processor=kind) for kind in ("GenuineIntel 6-85 avx512f", "GenuineIntel 6-207 amx_bf16"))


def test_two_kinds_of_processor_of_one_name_are_two_machines(tmp_path: Path):
    assert "processor is GenuineIntel 6-85 avx512f in the baseline and GenuineIntel 6-207" in refusal(
        run(OLDER), run(NEWER)
    )
    assert "mixes machines: processor" in refusal(run(), run(OLDER, NEWER))
    save(run(OLDER), tmp_path / "kept")
    ((status, reason),) = judged(tmp_path / "kept", written(tmp_path / "new.jsonl", run(NEWER)))[1]
    assert (status, "another machine (processor differ)" in reason) == ("no_baseline", True)


@pytest.mark.parametrize("before, now", [(CPU, CPU), (CPU, OLDER), (OLDER, CPU), (OLDER, OLDER)])
def test_an_unknown_processor_agrees_with_any(tmp_path: Path, before: Environment, now: Environment):
    check_comparable(run(before), run(now))
    save(run(before), tmp_path / "kept")
    assert judged(tmp_path / "kept", written(tmp_path / "new.jsonl", run(now)))[0] == "pass"
