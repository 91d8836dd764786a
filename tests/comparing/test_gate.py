"""Gates between real commits of a real little repository, and between stored runs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import gate_factory
import msgspec
import pytest
from git_repository import Repository
from record_factory import CPU, incorrect, noisy, ok, unsupported, workload

from attnbench.comparing import compare as comparing
from attnbench.comparing import gate as gating
from attnbench.comparing.baselines import save
from attnbench.comparing.ci_files import FILES, write_files
from attnbench.comparing.compare import compare_refs
from attnbench.comparing.experiment import Terms
from attnbench.comparing.gate import GateOrder, gate_refs
from attnbench.comparing.gate_text import verdict
from attnbench.comparing.refs import BuildFailed
from attnbench.comparing.stored import gate_stored
from attnbench.comparison import EXIT_CODES, LOOKS, Control
from attnbench.errors import UsageError
from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.results.run_file import RunWriter, new_header, read_run
from attnbench.run.machine import machine_lock
from attnbench.run.user_functions import sources_of
from attnbench.spec import Workload

SMALL = Workload(batch=1, q_len=64, heads=2, head_dim=16)
PLAIN = """
import numpy as np

def attend(q, k, v):
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v).astype(q.dtype)
"""
THRICE = (
    PLAIN.replace("def attend", "def once")
    + "\ndef attend(q, k, v):\n    once(q, k, v)\n    once(q, k, v)\n    return once(q, k, v)\n"
)
SILENT = [
    Control(name=name, passed=False, comparison=gate_factory.comparison("inconclusive", 1.02))
    for name in ("a/a", "+5 %")
]
WRONG = "def attend(q, k, v):\n    return q * 0\n"
ONE_LAUNCH = {"budget_s": 0.01}
"""For tests in which it does not matter what the clock says: a comparison ends with its first launch."""


class Quiet:
    """Hears everything."""

    def __init__(self):
        self.titles = []

    def begin(self, title):
        self.titles.append(title)

    def __call__(self, launches, decision):
        pass


@pytest.fixture
def repository(tmp_path, monkeypatch, request):
    made = Repository(tmp_path / "package")
    made.write("attnbench.toml", 'framework = "numpy"\n')
    made.commit("first", "fast.py", PLAIN)
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    for module in (gating, comparing):
        monkeypatch.setattr(module, "Terms", partial(Terms, launch_s=0.05))
    monkeypatch.setattr(gating, "CPU_CONTROL", SMALL)
    monkeypatch.setattr(gating, "CPU_MORE_WORK", msgspec.structs.replace(SMALL, batch=3))
    if "real_controls" not in request.fixturenames:
        pretend_controls(monkeypatch)
    return made


def pretend_controls(monkeypatch):
    monkeypatch.setattr(gating._Gate, "controls", lambda self: list(gate_factory.controls()))


@pytest.fixture
def real_controls(monkeypatch):
    """For tests whose gates really run their controls; the others save the time. Equals are looked at once: on a busy
    machine they would go on until the last look."""
    compare = gating._Gate._compare

    def with_one_look_at_equals(self, first, second, terms, title):
        terms = msgspec.structs.replace(terms, looks=LOOKS[:1]) if title == "control A/A" else terms
        return compare(self, first, second, terms, title)

    monkeypatch.setattr(gating._Gate, "_compare", with_one_look_at_equals)


def run(repository, baseline="HEAD~1", current="HEAD", name="fast:attend", watch=None, **fields):
    order = GateOrder(
        baseline=baseline,
        current=current,
        suite="own",
        workloads=(SMALL,),
        implementations=(name,),
        folder=repository.path,
        threads=1,
        **fields,
    )
    return gate_refs(order, watch or Quiet())


def test_a_slower_commit_is_found_confirmed_and_named(repository, real_controls, monkeypatch):
    slow = repository.commit("thrice the work", "fast.py", THRICE)
    watch = Quiet()
    report = run(repository, watch=watch)
    (case,) = report.cases
    assert (report.outcome, case.status) == ("fail", "regression")
    assert case.first.verdict == case.second.verdict == "slower"
    assert len(case.second.launches) == 16
    assert case.p_holm < 0.01
    assert case.culprit == f'{slow[:9]} "thrice the work"'
    assert [control.name for control in report.controls] == ["a/a", "+5 %"]
    alike = report.controls[0]  # what disturbs a machine may make it fail; how often it does is for test_statistics
    assert alike.passed == (alike.comparison.verdict == "same")
    assert report.controls[1].passed, "thrice the work, on any machine"
    assert slow[:9] in report.current
    assert (case.first.commit_a, case.first.commit_b) == (repository.git("rev-parse", "HEAD~1"), slow)
    assert [title.partition(" ")[0] for title in watch.titles] == ["fast:attend", "fast:attend", "control", "control"]
    assert repository.worktrees() == 1
    pretend_controls(monkeypatch)
    back = run(repository, "HEAD", "HEAD~1")
    assert (back.outcome, back.cases[0].status) == ("pass", "improved"), "an improvement never fails"


def test_an_interrupted_gate_tells_what_it_had(repository, monkeypatch):
    repository.commit("nothing new", "other.py", "")
    real, asked = gating._Gate._case, []

    def until_the_second(self, name, workload, first, second):
        if asked:
            raise KeyboardInterrupt
        asked.append(workload)
        return real(self, name, workload, first, second)

    monkeypatch.setattr(gating._Gate, "_case", until_the_second)
    other = msgspec.structs.replace(SMALL, batch=3)
    order = GateOrder(
        baseline="HEAD~1", current="HEAD", suite="own", workloads=(SMALL, other), implementations=("fast:attend",),
        folder=repository.path, threads=1, **ONE_LAUNCH,
    )  # fmt: skip
    report = gate_refs(order, Quiet())
    assert report.outcome == "interrupted"
    assert EXIT_CODES[report.outcome] == 130
    assert [case.workload for case in report.cases] == [SMALL]
    assert report.controls == ()
    assert any("after 1 of 2 cases" in warning for warning in report.warnings)
    assert "Interrupted, so this is not a verdict" in verdict(report)
    assert repository.worktrees() == 1
    with pytest.raises(KeyboardInterrupt):
        gate_refs(order, Quiet())


@pytest.mark.parametrize("after", [0, 1])
def test_ctrl_c_in_the_controls_keeps_the_finished_cases(repository, monkeypatch, after):
    repository.commit("nothing new", "other.py", "")

    def interrupted(self):
        yield from gate_factory.controls()[:after]
        raise KeyboardInterrupt

    monkeypatch.setattr(gating._Gate, "controls", interrupted)
    found = gate_factory.case("wrong", first=gate_factory.comparison("same"))
    monkeypatch.setattr(gating._Gate, "_case", lambda *given: found)
    kept = []
    report = run(repository, on_progress=kept.append)
    assert (report.outcome, EXIT_CODES[report.outcome]) == ("interrupted", 130)
    assert [case.status for case in report.cases] == ["wrong"]
    assert len(report.controls) == after
    assert any("before the controls were finished" in warning for warning in report.warnings)
    assert [len(one.cases) for one in kept] == [1, 1], "as soon as a case is finished, and at the end"
    assert {one.outcome for one in kept} == {"interrupted"}


def test_an_error_in_the_controls_keeps_the_finished_cases(repository, monkeypatch):
    repository.commit("nothing new", "other.py", "")

    def broken(self):
        raise UsageError("no worker in sight")

    monkeypatch.setattr(gating._Gate, "controls", broken)
    for status, outcome in (("pass", "untrusted"), ("wrong", "fail")):
        found = gate_factory.case(status, first=gate_factory.comparison("same"))
        monkeypatch.setattr(gating._Gate, "_case", lambda *given, found=found: found)
        report = run(repository)
        assert (report.outcome, [case.status for case in report.cases]) == (outcome, [status])
        assert any("the controls ended early: no worker in sight" in warning for warning in report.warnings)


def crashing(where, times):
    """An attention that ends its process the first so many times it is called."""
    return PLAIN.replace("def attend", "def plain") + (
        f"\ndef attend(q, k, v):\n    import os, pathlib\n    folder = pathlib.Path({str(where)!r})\n"
        f"    if len(list(folder.iterdir())) < {times}:\n"
        "        (folder / str(os.getpid())).touch()\n        os.abort()\n"
        "    return plain(q, k, v)\n"
    )


@pytest.mark.parametrize("times,statuses", [(1, ("pass", "inconclusive")), (99, ("inconclusive",))])
def test_a_baseline_that_is_lost_is_measured_again_and_never_passes_for_new(repository, tmp_path, times, statuses):
    (tmp_path / "crashes").mkdir()
    repository.commit("crashes", "fast.py", crashing(tmp_path / "crashes", times))
    repository.commit("mended", "fast.py", PLAIN)
    report = run(repository, **ONE_LAUNCH)
    (case,) = report.cases
    assert case.status in statuses
    assert (case.first.verdict is None) == (times == 99)
    if times == 99:
        assert "the baseline was lost: failed: crashed with SIGABRT" in case.reason
        assert len(list((tmp_path / "crashes").iterdir())) == 2


def test_a_baseline_whose_process_dies_while_it_loads_is_not_new_either(repository):
    repository.commit("leaves", "fast.py", "import os\nos._exit(3)\n")
    repository.commit("mended", "fast.py", PLAIN)
    report = run(repository)
    assert [case.status for case in report.cases] == ["inconclusive"]
    assert report.outcome != "pass"


def test_a_build_that_edits_the_other_worktree_is_refused(repository, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))  # or it would edit the worktrees of tests beside it
    monkeypatch.setattr("tempfile.tempdir", None)
    build = "for f in ${TMPDIR:-/tmp}/attnbench-*/package; do [ $f = $PWD ] || echo '# slower' >> $f/fast.py; done\n"
    repository.write("attnbench.toml", 'framework = "numpy"\nbuild = "sh build.sh"\n')
    repository.commit("an innocent build", "build.sh", "true\n")
    repository.commit("a build that helps itself", "build.sh", build)
    with pytest.raises(UsageError, match=r"fast.py of HEAD~1 changed after the build"):
        run(repository)
    assert repository.worktrees() == 1


def test_sources_that_change_while_they_are_measured_leave_no_verdict(repository, monkeypatch):
    repository.commit("nothing new", "other.py", "")

    def edit(self, *given):
        (self._old.path / "fast.py").write_text(THRICE)
        return gate_factory.case("improved")

    monkeypatch.setattr(gating._Gate, "_case", edit)
    report = run(repository)
    assert report.outcome == "untrusted"
    assert any("fast.py of HEAD~1 changed during the measurement" in warning for warning in report.warnings)
    assert "Untrusted: see the warnings" in verdict(report)


def test_names_that_are_no_code_of_the_repository_never_pass(repository):
    repository.commit("nothing new", "other.py", "")
    report = run(repository, name="numpy.float32")
    assert [case.status for case in report.cases] == ["inconclusive"]
    assert "none of this repository's code would be measured" in report.cases[0].reason
    assert report.outcome != "pass"


def test_what_the_baseline_asked_for_is_read_from_its_own_folder(repository):
    repository.commit("fewer cases", "attnbench.toml", "")
    report = run(repository, name="nowhere:attend", relaxed=lambda here: [(here / "attnbench.toml").read_text()])
    assert 'HEAD~1 framework = "numpy"\n' in report.warnings


def test_what_neither_ref_can_load_is_not_new(repository):
    repository.commit("nothing new", "other.py", "")
    report = run(repository, name="nowhere:attend")
    assert [case.status for case in report.cases] == ["inconclusive"]
    assert "set pythonpath" in report.cases[0].reason


def test_a_faster_but_wrong_commit_fails(repository):
    repository.commit("fast and wrong", "fast.py", WRONG)
    report = run(repository)
    assert (report.outcome, report.cases[0].status) == ("fail", "wrong")
    assert "error allowed" in report.cases[0].reason


REFUSING = "\ndef picky(q, k, v):\n    raise NotImplementedError('no such width')\n"


@pytest.mark.parametrize(
    "name, before", [("picky", PLAIN + REFUSING), ("fresh", PLAIN + "\n"), ("fresh", "import os\nos._exit(3)\n")]
)
def test_wrong_numbers_fail_although_the_baseline_has_none(repository, name, before):
    repository.commit("before", "fast.py", before)
    repository.commit("wrong", "fast.py", f"{PLAIN}\ndef {name}(q, k, v):\n    return q * 0\n")
    report = run(repository, name=f"fast:{name}")
    assert (report.outcome, report.cases[0].status) == ("fail", "wrong")
    assert report.cases[0].first.record_b.status == "incorrect"


def test_a_new_function_that_refuses_or_crashes_is_not_measured(repository):
    repository.commit("new", "fast.py", PLAIN + REFUSING)
    (case,) = run(repository, name="fast:picky").cases
    assert case.status == "not_measured"
    assert "no such width" in case.reason


@pytest.mark.parametrize("baseline, current", [("HEAD", "HEAD"), ("HEAD", "main"), (".", "HEAD"), (".", ".")])
def test_two_names_of_one_code_are_nothing_to_compare(repository, baseline, current):
    repository.write("runs/cpu/one.jsonl", "")  # what attnbench writes is no change of the code
    report = run(repository, baseline, current)
    assert (report.outcome, report.cases, EXIT_CODES[report.outcome]) == ("nothing", (), 3)
    assert "there is nothing to compare" in report.warnings[0]
    assert verdict(report).startswith("Nothing could be measured")
    with pytest.raises(UsageError, match="there is nothing to compare"):
        compare_refs(
            baseline=baseline, current=current, implementation="fast:attend", workload=SMALL, folder=repository.path
        )


def test_a_gate_that_writes_into_the_working_tree_is_trusted_again_and_again(repository, monkeypatch):
    monkeypatch.setattr(gating._Gate, "_case", lambda *given: gate_factory.case("pass"))
    repository.write("fast.py", THRICE)
    outputs = tuple(repository.path / "out" / name for name in FILES)
    for _ in range(2):
        report = run(
            repository, "HEAD", ".", outputs=outputs, on_progress=lambda one: write_files(one, repository.path / "out")
        )
        assert report.outcome == "pass", report.warnings
        assert not any("out/gate" in warning for warning in report.warnings)


@pytest.mark.parametrize("changed, differs", [("measuring/sampling.py", True), ("impls/mine.py", False)])
def test_refs_that_measure_in_different_ways_are_not_judged_by_time(repository, monkeypatch, changed, differs):
    for name in ("__init__.py", "run/worker.py"):
        repository.write(f"src/attnbench/{name}", "")
    repository.write(f"src/attnbench/{changed}", "half = 1\n")
    repository.commit("a copy of attnbench")
    repository.commit("its clock", f"src/attnbench/{changed}", "half = 2\n")
    for status in ("pass", "improved", "memory", "wrong"):
        monkeypatch.setattr(gating._Gate, "_case", lambda *given, status=status: gate_factory.case(status))
        monkeypatch.setattr(gating._Gate, "_sides", lambda *given: nullcontext((None, None)))
        report = run(repository)
        expected = "inconclusive" if differs and status != "wrong" else status
        assert report.cases[0].status == expected
        assert (
            any(f"own measuring code differs between HEAD~1 and HEAD ({changed})" in text for text in report.warnings)
            == differs
        )
    with comparing.refs("HEAD~1", "HEAD", repository.path) as both:
        assert bool(comparing.harness_notes(*both)) == differs


def test_code_that_does_not_load_counts_as_its_side(repository, real_controls):
    repository.commit("broken", "fast.py", "def attend(:\n")
    broken = run(repository)
    assert (broken.outcome, broken.cases[0].status) == ("fail", "wrong")
    assert "SyntaxError" in broken.cases[0].reason
    new = run(repository, "HEAD", "HEAD~1")
    assert new.cases[0].status == "no_baseline"
    assert new.outcome == "nothing"


def test_a_module_that_a_ref_lacks_is_not_taken_from_the_working_tree(repository, monkeypatch):
    repository.commit("a new module", "fresh.py", PLAIN)
    monkeypatch.chdir(repository.path)
    monkeypatch.syspath_prepend(str(repository.path))
    for name in ("fresh:attend", "fresh.py:attend"):
        report = run(repository, name=name)
        assert [case.status for case in report.cases] == ["no_baseline"], report.cases[0].reason


def test_code_that_kills_its_process_while_it_loads_fails_its_own_cases(repository):
    repository.commit("leaves", "fast.py", "import os\nos._exit(3)\n")
    report = run(repository)
    assert (report.outcome, report.cases[0].status) == ("fail", "wrong")


def test_a_crash_counts_only_when_it_happens_again(repository, tmp_path):
    once = tmp_path / "happened"
    crash = f"\n\nplain = attend\n\ndef attend(q, k, v):\n    import os\n    if not os.path.exists({str(once)!r}):\n"
    crash += f"        open({str(once)!r}, 'w').close()\n        os.abort()\n    return plain(q, k, v)\n"
    repository.commit("crashes once", "fast.py", PLAIN + crash)
    assert run(repository, **ONE_LAUNCH).cases[0].status in ("pass", "inconclusive")
    repository.commit("crashes always", "fast.py", "import os\n\ndef attend(q, k, v):\n    os.abort()\n")
    assert run(repository, "HEAD~2").cases[0].status == "wrong"


def test_a_kernel_that_cannot_do_the_usual_control_has_one_of_its_own(repository, real_controls, monkeypatch):
    monkeypatch.setattr(gating, "CPU_CONTROL", msgspec.structs.replace(SMALL, dtype="float16", head_dim=8))
    picky = PLAIN.replace("    logits =", "    assert q.shape[-1] == 16\n    logits =")
    repository.commit("picky", "fast.py", picky)
    repository.commit("no change", "notes.txt", "nothing")
    report = run(repository, **ONE_LAUNCH)
    assert [control.name for control in report.controls] == ["a/a", "+5 %"]
    assert report.controls[0].comparison.workload.batch == 20


def test_a_budget_that_is_none_is_refused(repository):
    repository.commit("second")
    with pytest.raises(UsageError, match="budget_s must be a finite number of seconds above 0"):
        run(repository, budget_s=0.0)


def test_uncommitted_changes_count_only_when_asked_for(repository):
    repository.commit("no change", "notes.txt", "nothing")
    repository.write("fast.py", WRONG)
    clean = run(repository, **ONE_LAUNCH)
    assert clean.cases[0].status in ("pass", "inconclusive")
    assert any("uncommitted changes" in text for text in clean.warnings)
    dirty = run(repository, "HEAD", ".")
    assert dirty.cases[0].status == "wrong"
    assert "uncommitted changes" in dirty.current


def test_a_ref_that_does_not_build_is_a_usage_error(repository):
    repository.write("attnbench.toml", 'framework = "numpy"\nbuild = "echo no compiler; exit 3"\n')
    repository.commit("cannot build")
    with pytest.raises(BuildFailed, match="exit code 3"):
        run(repository)
    assert repository.worktrees() == 1


def test_two_gates_at_once_refuse_each_other(repository):
    repository.commit("second")
    with machine_lock(), pytest.raises(UsageError, match="another attnbench gate"):
        run(repository)


@pytest.mark.parametrize(
    "controls,outcome,warning",
    [
        (
            [Control(name="a/a", passed=False, comparison=gate_factory.comparison("slower", 1.05))],
            "untrusted",
            "A/A control failed",
        ),
        ([], "untrusted", "no implementation of the baseline could be timed"),
        (SILENT, "inconclusive", "all controls were inconclusive"),
    ],
)
def test_without_a_good_control_a_gate_is_not_trusted(repository, monkeypatch, controls, outcome, warning):
    repository.commit("no change", "notes.txt", "nothing")
    monkeypatch.setattr(gating._Gate, "controls", lambda self: controls)
    monkeypatch.setattr(gating._Gate, "_case", lambda *given: gate_factory.case("pass"))
    report = run(repository)
    assert report.outcome == outcome
    assert EXIT_CODES[outcome] == (4 if controls is SILENT else 5)
    assert any(warning in text for text in report.warnings)


def test_one_implementation_in_two_refs(repository):
    repository.commit("thrice the work", "fast.py", THRICE)
    found = compare_refs(
        baseline="HEAD~1",
        current="HEAD",
        implementation="fast:attend",
        workload=SMALL,
        folder=repository.path,
        threads=1,
        budget_s=30,
    )
    assert found.verdict == "slower"
    assert "HEAD~1" in found.a
    by_file = compare_refs(
        baseline="HEAD~1",
        current="HEAD",
        implementation="fast.py:attend",
        workload=SMALL,
        folder=repository.path,
        threads=1,
        budget_s=30,
    )
    assert by_file.verdict == "slower"


@pytest.mark.parametrize("current, dirty", [(".", True), ("HEAD", False)])
def test_a_comparison_says_that_its_tree_had_uncommitted_changes(repository, monkeypatch, current, dirty):
    class Answered:
        def __init__(self, *given):
            pass

        def run(self):
            return gate_factory.comparison()

    monkeypatch.setattr("attnbench.comparing.compare.Experiment", Answered)
    monkeypatch.setattr("attnbench.comparing.compare.sides", lambda *given: nullcontext((None, None)))
    repository.commit("nothing new", "other.py", "")
    repository.write("fast.py", THRICE)
    found = compare_refs(
        baseline="HEAD~1", current=current, implementation="fast:attend", workload=SMALL, folder=repository.path
    )
    told = msgspec.json.decode(msgspec.json.encode(found))
    assert (told["dirty_a"], told["dirty_b"]) == (False, dirty)
    assert any(f'"." is {found_commit(repository)} with uncommitted changes' in note for note in told["notes"]) == dirty


def found_commit(repository):
    return repository.git("rev-parse", "HEAD")[:9]


# Stored runs


def stored(folder, median, environment=CPU, extra=()):
    records = [
        ok("torch.sdpa", noisy(median, 1), environment=environment),
        *(
            ok(f"anchor.{name}", noisy(1e5, seed), environment=environment)
            for name, seed in (("matmul", 2), ("copy", 3))
        ),
        *extra,
    ]
    writer = RunWriter.create(folder, "cpu", "ci", new_header("0", "ci"))
    writer.write(records)
    writer.close()
    return writer.path


def judge(old, new):
    return gate_stored(old, new, lambda implementation, workload: 0.01, "inconclusive")


@pytest.mark.parametrize(
    "factor,outcome,status", [(1.3, "fail", "regression"), (1.0, "pass", "pass"), (0.7, "pass", "improved")]
)
def test_two_run_files_are_judged_relative_to_their_anchors(tmp_path, factor, outcome, status):
    report = judge(stored(tmp_path / "old", 5e6), stored(tmp_path / "new", factor * 5e6))
    assert report.outcome == outcome
    assert [case.status for case in report.cases if case.implementation == "torch.sdpa"] == [status]
    assert any("no controls" in text for text in report.warnings)


def test_a_run_that_is_judged_against_itself_says_so(tmp_path):
    old, new = stored(tmp_path / "old", 5e6), stored(tmp_path / "new", 5.05e6)
    assert [any("nothing new was judged" in text for text in judge(old, one).warnings) for one in (old, new)] == [
        True, False,
    ]  # fmt: skip


def test_runs_of_other_machines_are_refused_with_the_field(tmp_path):
    other = msgspec.structs.replace(CPU, cores=CPU.cores + 6)
    with pytest.raises(UsageError, match=r"cores is \d+ in the baseline and \d+ in the current run"):
        judge(stored(tmp_path / "old", 5e6), stored(tmp_path / "new", 5e6, other))


def test_wrong_numbers_in_the_current_run_fail(tmp_path):
    old = stored(tmp_path / "old", 5e6, extra=[ok("torch.eager", noisy(5e6, 4), environment=CPU)])
    new = stored(tmp_path / "new", 5e6, extra=[incorrect("torch.eager", "output: 9 x the error allowed")])
    report = judge(old, new)
    assert report.outcome == "fail"
    assert {case.implementation: case.status for case in report.cases}["torch.eager"] == "wrong"


def test_a_run_against_saved_baselines(tmp_path):
    old = stored(tmp_path / "old", 5e6)
    save(read_run(old).records, tmp_path / "baselines")
    new = stored(tmp_path / "new", 6.5e6, extra=[ok("torch.eager", noisy(5e6, 4), environment=CPU)])
    report = judge(tmp_path / "baselines", new)
    found = {case.implementation: case for case in report.cases}
    assert report.outcome == "fail"
    assert found["torch.sdpa"].status == "regression"
    assert found["torch.eager"].status == "no_baseline"
    assert "attnbench baseline save" in found["torch.eager"].reason
    assert workload().id in found["torch.eager"].id


def test_floors_configs_and_lost_cases_count_against_saved_baselines(tmp_path):
    tuned = ok("torch.flex", noisy(5e6, 5), environment=CPU, config={"block": 64})
    old = stored(tmp_path / "old", 5e6, extra=[tuned, ok("torch.eager", noisy(5e6, 4), environment=CPU)])
    save(read_run(old).records, tmp_path / "baselines")
    lost = msgspec.structs.replace(unsupported("torch.eager", "no longer"), environment=CPU)
    slower = msgspec.structs.replace(tuned, time=ok("x", noisy(6.5e6, 6)).time)
    new = stored(tmp_path / "new", 6.5e6, extra=[lost, slower])
    found = {case.implementation: case.status for case in judge(tmp_path / "baselines", new).cases}
    assert found["torch.eager"] == "wrong"
    assert [status for name, status in found.items() if name.startswith("torch.flex")] == ["regression"]
    high = gate_stored(tmp_path / "baselines", new, lambda implementation, workload: 0.5, "inconclusive")
    assert {case.implementation: case.status for case in high.cases}["torch.sdpa"] == "pass"
    alone = stored(tmp_path / "alone", 5e6)
    dropped = judge(tmp_path / "baselines", alone)
    assert dropped.outcome == "inconclusive"
    assert [case.status for case in dropped.cases].count("missing") == 2
    elsewhere = [ok(name, noisy(5e6, 7), workload(64), environment=CPU) for name in ("torch.sdpa", *ANCHORS)]
    save(elsewhere, tmp_path / "baselines")
    assert [case.status for case in judge(tmp_path / "baselines", alone).cases].count("not_measured") == 1


def test_a_torn_line_of_either_run_is_in_the_report(tmp_path):
    sound, torn = stored(tmp_path / "sound", 5e6), stored(tmp_path / "torn", 5e6)
    torn.write_bytes(torn.read_bytes() + b'{"line":"record","rec')
    save(read_run(sound).records, tmp_path / "kept")
    for old, new in ((sound, torn), (torn, sound), (tmp_path / "kept", torn)):
        assert any("the last line was cut off" in warning for warning in judge(old, new).warnings)


def of_file(path, name, median=1e6):
    """A run of `attend` of a file."""
    records = [ok("attend", noisy(median, 1)), *(ok(anchor, noisy(1e5, n)) for n, anchor in enumerate(ANCHORS))]
    writer = RunWriter(path, new_header("0.1.0", "ci", {"implementations": [f"{name}:attend", "torch.sdpa"]}))
    writer.write(records)
    writer.close()
    return records


@pytest.mark.parametrize(
    "before, now, is_one",
    [
        ("alice.py", "bob.py", False),
        ("a/kern.py", "b/kern.py", False),
        ("kern.py", "/home/me/kern.py", True),
        ("src/pkg/kern.py", "pkg.kern", True),
    ],
)
def test_functions_of_one_name_and_two_files_are_not_compared(tmp_path, before, now, is_one):
    old, new, folder = tmp_path / "old.jsonl", tmp_path / "new.jsonl", tmp_path / "kept"
    records = of_file(old, before)
    of_file(new, now, 3e6)
    save(records, folder, sources=sources_of(read_run(old)))
    for baseline in (old, folder):
        report = gate_stored(baseline, new, lambda implementation, workload: 0.01, "inconclusive")
        (case,) = report.cases
        assert case.status == ("regression" if is_one else "no_baseline")
        assert is_one or case.reason.endswith(f"another function of that name, from {before}: this one is from {now}")
    save(records, tmp_path / "older")  # of a version that did not write it down
    older = gate_stored(tmp_path / "older", new, lambda implementation, workload: 0.01, "inconclusive")
    assert older.cases[0].status == "regression"
