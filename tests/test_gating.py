"""Gates between real commits of a real little repository, and between stored runs."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from gate_factory import comparison
from git_repository import Repository
from record_factory import CPU, incorrect, noisy, ok, workload

from attnbench import gating
from attnbench.comparing import compare_refs
from attnbench.comparison import EXIT_CODES, Control
from attnbench.errors import UsageError
from attnbench.gating import GateOrder, gate_refs
from attnbench.gating_stored import gate_stored
from attnbench.run.duel import Terms
from attnbench.run.lock import machine_lock
from attnbench.run.refs import BuildFailed
from attnbench.spec import Workload
from attnbench.store.baselines import save
from attnbench.store.runfile import RunWriter, new_header, read_run

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
WRONG = "def attend(q, k, v):\n    return q * 0\n"


class Quiet:
    """Hears everything."""

    def __init__(self):
        self.titles = []

    def begin(self, title):
        self.titles.append(title)

    def __call__(self, launches, decision):
        pass


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path / "package")
    made.write("attnbench.toml", 'framework = "numpy"\n')
    made.commit("first", "fast.py", PLAIN)
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gating, "Terms", partial(Terms, launch_s=0.05))
    monkeypatch.setattr(gating, "CPU_CONTROL", SMALL)
    monkeypatch.setattr(gating, "CPU_MORE_WORK", msgspec.structs.replace(SMALL, batch=3))
    return made


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


def test_a_slower_commit_is_found_confirmed_and_named(repository):
    slow = repository.commit("thrice the work", "fast.py", THRICE)
    watch = Quiet()
    report = run(repository, watch=watch)
    (case,) = report.cases
    assert (report.outcome, case.status) == ("fail", "regression")
    assert case.first.verdict == case.second.verdict == "slower"
    assert len(case.second.launches) == 16
    assert case.p_holm < 0.01
    assert case.culprit == f'{slow[:9]} "thrice the work"'
    assert [(control.name, control.passed) for control in report.controls] == [("a/a", True), ("+5 %", True)]
    assert slow[:9] in report.current
    assert (case.first.commit_a, case.first.commit_b) == (repository.git("rev-parse", "HEAD~1"), slow)
    assert [title.partition(" ")[0] for title in watch.titles] == ["control", "control", "fast:attend", "fast:attend"]
    assert repository.worktrees() == 1
    back = run(repository, "HEAD", "HEAD~1")
    assert (back.outcome, back.cases[0].status) == ("pass", "improved"), "an improvement never fails"


def test_a_faster_but_wrong_commit_fails(repository):
    repository.commit("fast and wrong", "fast.py", WRONG)
    report = run(repository)
    assert (report.outcome, report.cases[0].status) == ("fail", "wrong")
    assert "error allowed" in report.cases[0].reason


def test_code_that_does_not_load_counts_as_its_side(repository):
    repository.commit("broken", "fast.py", "def attend(:\n")
    broken = run(repository)
    assert (broken.outcome, broken.cases[0].status) == ("fail", "wrong")
    assert "SyntaxError" in broken.cases[0].reason
    new = run(repository, "HEAD", "HEAD~1")
    assert new.cases[0].status == "no_baseline"
    assert new.outcome in ("nothing", "untrusted")


def test_uncommitted_changes_count_only_when_asked_for(repository):
    repository.commit("no change", "notes.txt", "nothing")
    repository.write("fast.py", WRONG)
    clean = run(repository)
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
        ([Control(name="a/a", passed=False, comparison=comparison("slower", 1.05))], "untrusted", "A/A control failed"),
        ([], "untrusted", "no implementation of the baseline could be timed"),
    ],
)
def test_without_a_good_control_a_gate_is_not_trusted(repository, monkeypatch, controls, outcome, warning):
    repository.commit("no change", "notes.txt", "nothing")
    monkeypatch.setattr(gating._Gate, "controls", lambda self: controls)
    report = run(repository)
    assert report.outcome == outcome
    assert EXIT_CODES[outcome] == 5
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
