"""`attnbench bisect` on a real little repository; only the comparison itself is played."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gate_factory import comparison
from git_repository import Repository
from record_factory import workload

from attnbench.cli import execute
from attnbench.comparing import bisect as bisecting
from attnbench.comparing import compare as comparing
from attnbench.comparing.refs import BuildFailed
from attnbench.comparison import Comparison
from attnbench.run.machine import machine_lock

SHAPE = ["--batch", "1", "--seq-len", "128", "--heads", "4", "--head-dim", "32", "--causal"]


class Bench:
    """Answers by the number of the candidate's commit."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.asked: list[tuple[str, str]] = []
        self.slow, self.same = 1.06, 1.0
        self.verdict: Callable[[int], str | None] = lambda number: "slower" if number >= 6 else "same"

    def compare(self, baseline: str, current: str, implementation: str, workload) -> Comparison:
        number = int(self.repository.git("log", "-1", "--format=%s", current).split()[1])
        self.asked.append((baseline, current))
        verdict = self.verdict(number)
        if verdict == "broken":
            raise BuildFailed(current, current, "make", 2, "no")
        ratio = None if verdict is None else {"slower": self.slow, "same": self.same}.get(verdict, 1.02)
        names = {"a": baseline, "b": current, "workload": workload, "reason": "" if verdict else "crashed"}
        return comparison(verdict, ratio or 1.0, **names)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    repository = Repository(tmp_path / "project")
    for number in range(10):
        repository.commit(f"step {number}", "step.py")
    repository.git("tag", "v1", "HEAD~9")
    monkeypatch.chdir(repository.path)
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    made = Bench(repository)
    monkeypatch.setattr(bisecting, "compare_refs", made.compare)
    return made


def test_the_commit_is_named_after_few_comparisons(bench: Bench, capsys: pytest.CaptureFixture[str]):
    assert execute(["bisect", "torch.sdpa", "--good", "v1", "--bad", "main", *SHAPE]) == 0
    out, err = capsys.readouterr()
    culprit = bench.repository.git("rev-parse", "--short=12", "HEAD~3")
    assert f'torch.sdpa on {workload().id} is slower (1.060x, 1.050-1.070) since {culprit} "step 6"' in out
    assert "of 9 commits were compared" in out
    assert "main is slower than v1; searching 9 commits" in err
    first, *rest = bench.asked
    assert first == (bench.repository.git("rev-parse", "v1"), bench.repository.git("rev-parse", "main"))
    assert len(rest) <= 4
    assert {good for good, _ in bench.asked} == {first[0]}


def test_a_bad_that_is_not_slower_ends_it(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.verdict = lambda number: "same"
    assert execute(["bisect", "torch.sdpa", "--good", "v1", *SHAPE]) == 1
    assert "is not slower in HEAD than in v1: same (1.000x" in capsys.readouterr().out
    assert len(bench.asked) == 1


@pytest.mark.parametrize("verdict,code,words", [("inconclusive", 4, "Inconclusive whether"), (None, 3, "crashed")])
def test_a_start_that_cannot_be_judged(
    bench: Bench, capsys: pytest.CaptureFixture[str], verdict: str | None, code: int, words: str
):
    bench.verdict = lambda number: verdict
    assert execute(["bisect", "torch.sdpa", "--good", "v1", *SHAPE]) == code
    assert words in capsys.readouterr().out


def test_commits_that_do_not_build_are_stepped_over(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.verdict = lambda number: "broken" if number in (5, 6) else "slower" if number >= 6 else "same"
    assert execute(["bisect", "torch.sdpa", "--good", "v1", "--json", *SHAPE]) == 4
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document["found"]["first"] is None
    assert len(document["found"]["suspects"]) == 3
    assert "since one of 3 commits" in document["closing"]
    assert "2 could not be judged" in document["closing"]


def test_a_slowdown_within_the_bounds_of_same_names_no_innocent_commit(
    bench: Bench, capsys: pytest.CaptureFixture[str]
):
    bench.slow, bench.same = 1.025, 1.01  # known to 1 %: what is "same" may well be as slow
    assert execute(["bisect", "torch.sdpa", "--good", "v1", "--json", *SHAPE]) == 4
    document = json.loads(capsys.readouterr().out)
    found, git = document["found"], bench.repository.git
    assert found["first"] is None
    assert [git("log", "-1", "--format=%s", one) for one in found["suspects"]] == [f"step {n}" for n in range(1, 7)]
    assert set(found["tried"].values()) == {True, None}


def test_a_good_one_that_does_not_build_is_an_error(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.verdict = lambda number: "broken"
    assert execute(["bisect", "torch.sdpa", "--good", "v1", *SHAPE]) == 2
    assert "does not build" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options,words",
    [
        ("--good main --bad v1", "v1 has no commits that main lacks"),
        ("--good nothing", 'no git ref called "nothing"'),
        ("--good v1 --seq-len 64 128", "one workload at a time, and these options make 2"),
    ],
)
def test_usage_errors(bench: Bench, capsys: pytest.CaptureFixture[str], options: str, words: str):
    assert execute(["bisect", "torch.sdpa", *options.split()]) == 2
    assert words in capsys.readouterr().err
    assert bench.asked == []


def test_a_gate_at_the_same_time_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]):
    with machine_lock():
        assert execute(["bisect", "torch.sdpa", "--good", "v1", *SHAPE]) == 2
    assert "is measuring on this machine: wait for it" in capsys.readouterr().err
    assert bench.asked == []


def test_a_good_one_on_a_side_branch_is_told_of(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.repository.git("checkout", "--quiet", "-b", "side", "v1")
    bench.repository.commit("step 0", "side.py")
    assert execute(["bisect", "torch.sdpa", "--good", "side", "--bad", "main", *SHAPE]) == 0
    out, err = capsys.readouterr()
    assert "side is not an ancestor of main" in err
    assert '"step 6"' in out
    refs = [bench.repository.git("rev-parse", name) for name in ("side", "v1", "main")]
    assert bench.asked[:2] == [(refs[0], refs[2]), (refs[1], refs[2])]
    assert {good for good, _ in bench.asked[1:]} == {refs[1]}


@pytest.mark.parametrize(
    "since_fork,code,words",
    [("same", 1, "No commit of side is to blame"), ("inconclusive", 4, "no commit was searched for")],
)
def test_a_branch_that_lacks_what_made_the_good_one_faster_is_not_to_blame(
    bench: Bench, capsys: pytest.CaptureFixture[str], since_fork: str, code: int, words: str
):
    git = bench.repository.git
    git("checkout", "--quiet", "-b", "side", "v1")
    bench.repository.commit("step 0", "docs.md")
    main, base = git("rev-parse", "main"), git("rev-parse", "v1")
    bench.verdict = lambda number: "slower" if bench.asked[-1][0] == main else since_fork
    assert execute(["bisect", "torch.sdpa", "--good", "main", "--bad", "side", "--json", *SHAPE]) == code
    document = json.loads(capsys.readouterr().out)
    assert words in document["closing"]
    assert (document["confirmed"], document["found"]) == (False, None)
    assert document["common_ancestor"]["commit"] == base
    assert document["common_ancestor"]["comparison"]["verdict"] == since_fork
    assert git("rev-parse", "--short=12", "side") not in document["closing"]


def test_the_comparison_is_the_one_of_compare_refs(monkeypatch: pytest.MonkeyPatch):
    asked: dict = {}
    monkeypatch.setenv("ATTNBENCH_THREADS", "3")
    monkeypatch.setattr(comparing, "compare_refs", lambda **given: asked.update(given))
    bisecting.compare_refs("a", "b", "torch.sdpa", workload())
    wanted = {"baseline": "a", "current": "b", "implementation": "torch.sdpa", "workload": workload()}
    assert asked == wanted | {"device": None, "threads": 3}
