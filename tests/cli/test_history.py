"""`attnbench history` on run files of a real little repository."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import msgspec
import numpy as np
import pytest
from git_repository import Repository
from record_factory import CPU, incorrect, ok, workload

from attnbench.cli import execute
from attnbench.comparing.history import CommitPoint, CommitSeries, Key, Trend, closing, sparkline
from attnbench.results.run_file import Header, RunWriter

COMMITS = 16
SLOW_FROM = 9


def write_run(
    path: Path, commit: str, time: float, number: int, anchors: bool = True, subject: str = "torch.sdpa"
) -> None:
    """The later the commit, the earlier the run: only git knows the order."""
    drift = 1 + number % 3
    environment = msgspec.structs.replace(CPU, commit=commit)
    names = {subject.rpartition(":")[2]: time, "torch.eager": 4e6} | (
        {"anchor.matmul": 1e5, "anchor.copy": 1e5} if anchors else {}
    )
    noise = np.random.default_rng(number).normal(1, 0.004, len(names))
    request = {"implementations": [subject]}
    writer = RunWriter(path, Header(schema=1, attnbench="0", created=f"2026-01-{28 - number:02d}", request=request))
    writer.write([ok(n, [ns * drift * e] * 2, environment=environment) for (n, ns), e in zip(names.items(), noise)])
    writer.close()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Sixteen commits; from the tenth on torch.sdpa is 8 % slower. Commit 8 was not measured."""
    made = Repository(tmp_path / "project")
    monkeypatch.chdir(made.path)
    for number in range(COMMITS):
        made.commit(f"step {number}", "step.py")
        if number != SLOW_FROM - 1:
            commit = made.git("rev-parse", "--short=12", "HEAD")
            write_run(made.path / f"runs/m/{number}.jsonl", commit, 1.08e6 if number >= SLOW_FROM else 1e6, number)
    return made


def test_a_step_comes_with_its_suspects_and_the_command_to_confirm(
    repository: Repository, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("ruptures")
    assert execute(["history"]) == 0
    out = capsys.readouterr().out
    assert "torch.eager" in out
    (sentence,) = (line for line in out.splitlines() if " on b1-" in line)
    assert f"torch.sdpa on {workload().id} is 1.0" in sentence
    assert "x slower by one of 2 commits: " in sentence
    assert '"step 8", ' in sentence
    assert '"step 9".' in sentence
    words = shlex.split(sentence.partition("`")[2].partition("`")[0])
    assert words[:3] == ["attnbench", "bisect", "torch.sdpa"]
    good, bad = (words[words.index(option) + 1] for option in ("--good", "--bad"))
    assert repository.git("log", "-1", "--format=%s", good) == "step 7"
    assert repository.git("log", "-1", "--format=%s", bad) == "step 9"


def test_the_command_names_a_function_by_its_reference(repository: Repository, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("ruptures")
    for place, commit in enumerate(repository.git("log", "--reverse", "--format=%h", "--abbrev=12").split()):
        time = 2e6 if place >= SLOW_FROM else 1e6
        write_run(repository.path / f"own/{place}.jsonl", commit, time, place, subject="kernels/kern.py:attend")
    assert execute(["history", "own", "--impl", "attend"]) == 0
    (sentence,) = (line for line in capsys.readouterr().out.splitlines() if " on b1-" in line)
    words = shlex.split(sentence.partition("`")[2].partition("`")[0])
    assert words[:3] == ["attnbench", "bisect", "kernels/kern.py:attend"]


def test_what_a_newer_run_found_incorrect_is_told(repository: Repository, capsys: pytest.CaptureFixture[str]):
    assert execute(["history", "--impl", "torch.sdpa"]) == 0
    assert "incorrect" not in capsys.readouterr().out
    writer = RunWriter(repository.path / "runs/m/check.jsonl", Header(schema=1, attnbench="0", created="2026-02-01"))
    writer.write([incorrect("torch.sdpa", "sees the future")])
    writer.close()
    told = "torch.sdpa: a newer run found it incorrect on 1 shape; these are the times that each commit had."
    assert execute(["history", "--impl", "torch.sdpa"]) == 0
    assert told in capsys.readouterr().out
    assert execute(["history", "--impl", "torch.sdpa", "--json"]) == 0
    assert told in json.loads(capsys.readouterr().out)["closing"]


def test_json_holds_points_in_order_of_the_history(repository: Repository, capsys: pytest.CaptureFixture[str]):
    assert execute(["history", "runs", "--impl", "torch.sdpa", "-k", "causal", "--json"]) == 0
    (trend,) = json.loads(capsys.readouterr().out)["trends"]
    points = trend["series"]["points"]
    subjects = [repository.git("log", "-1", "--format=%s", point["commit"]) for point in points]
    assert subjects == [f"step {n}" for n in range(COMMITS) if n != SLOW_FROM - 1]
    assert [point["created"] for point in points] == sorted((p["created"] for p in points), reverse=True)


def test_commits_that_the_clone_lacks_are_placed_by_time(repository: Repository, capsys: pytest.CaptureFixture[str]):
    write_run(repository.path / "runs/m/odd.jsonl", "0123456789ab", 1e6, 27)
    assert execute(["history", "--impl", "torch.sdpa", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 commits are not in this clone; their runs are placed by time" in err
    created = [point["created"] for point in json.loads(out)["trends"][0]["series"]["points"]]
    assert created[0] == "2026-01-01"  # before every run of a known commit
    assert created[1:] == sorted(created[1:], reverse=True)


def test_an_uncommitted_run_leaves_the_commits_in_order(repository: Repository, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("ruptures")
    last = repository.git("rev-parse", "--short=12", "HEAD")
    write_run(repository.path / "runs/m/tree.jsonl", f"{last}+dirty", 1.08e6, 0)
    assert execute(["history", "--impl", "torch.sdpa"]) == 0
    out = capsys.readouterr().out
    assert "15 + 1 run" in out
    assert "slower by one of 2 commits: " in out


def test_commits_of_two_branches_have_no_suspect_between_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("ruptures")
    made = Repository(tmp_path / "project")
    monkeypatch.chdir(made.path)
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z")
    main = [made.commit(f"main {number}", "step.py") for number in range(8)]
    made.git("checkout", "--quiet", "-b", "side", main[3])
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T00:00:00Z")
    side = [made.commit(f"side {number}", "docs.md") for number in range(4)]
    for number, commit in enumerate([*main, *side]):
        write_run(made.path / f"runs/{number}.jsonl", commit, 0.9e6 if commit in main[4:] else 1e6, number)
    assert execute(["history", "--impl", "torch.sdpa", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (trend,) = document["trends"]
    apart = [change for change in trend["changes"] if change["diverged"]]
    assert [change["suspects"] for change in apart] == [[]]
    assert "which is on another branch" in document["closing"]
    (straight,) = (change for change in trend["changes"] if not change["diverged"])
    assert straight["suspects"] == [[main[4], "main 4"]]


def test_runs_without_anchors_are_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "bare.jsonl", "", 1e6, 1, anchors=False)
    assert execute(["history", "bare.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "2 records left out: its run has no anchor.matmul and no anchor.copy for this workload." in out
    assert "There is no history to show" in out


def test_baselines_are_points_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/old.jsonl", "aaaaaaaaaaaa", 1e6, 1)
    assert execute(["baseline", "save", "old"]) == 0
    write_run(tmp_path / "runs/new.jsonl", "bbbbbbbbbbbb", 2e6, 0)
    capsys.readouterr()
    assert execute(["history", "--impl", "torch.sdpa", "--json"]) == 0
    (trend,) = json.loads(capsys.readouterr().out)["trends"]
    assert [(p["commit"][0], p["runs"]) for p in trend["series"]["points"]] == [("a", 1), ("b", 1)]
    (tmp_path / "runs/old.jsonl").unlink()
    assert execute(["history", "baselines", "new", "--impl", "torch.sdpa"]) == 0
    assert "Too few commits to find a step: 2 at most, 6 are needed." in capsys.readouterr().out


def test_wrong_names_and_broken_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for command, words in (("history", "there are no run files"), ("history none", 'run file or folder "none"')):
        assert execute(command.split()) == 2
        assert words in capsys.readouterr().err
    write_run(tmp_path / "runs/good.jsonl", "aaaaaaaaaaaa", 1e6, 1)
    (tmp_path / "runs/bad.jsonl").write_text("nonsense\n")
    assert execute(["history", "--impl", "torch.fa3"]) == 2
    assert 'no record matches "torch.fa3"' in capsys.readouterr().err
    assert execute(["history"]) == 0
    assert "warning: runs/bad.jsonl, line 1" in capsys.readouterr().err
    assert execute(["history", "runs/bad.jsonl"]) == 2
    assert "runs/bad.jsonl, line 1" in capsys.readouterr().err


def test_the_sparkline_shows_steps_and_not_noise():
    assert sparkline([0.0] * 5 + [0.3] * 5) == "▁" * 5 + "█" * 5
    assert len(set(sparkline([0.001 * (-1) ** n for n in range(10)]))) == 1
    assert sparkline([1.0]) == "▄"
    assert len(sparkline([float(n) for n in range(1000)])) == 40


def test_steady_series_say_so():
    pytest.importorskip("ruptures")
    assert closing_of([0.0] * 8) == "No step of 2 % or more in 1 series."


def test_steps_that_noise_may_hide_are_not_denied():
    pytest.importorskip("ruptures")
    noisy = [0.0, 0.04, 0.01, 0.05, 0.0, 0.03, 0.01, 0.04]
    assert closing_of(noisy) == "No step was found in 1 series. Noise may hide a step of less than 18 %."
    assert closing_of([0.0] * 8, noisy, [3 * value for value in noisy]) == (
        "No step was found in 3 series. Noise may hide a step of less than 18 to 63 % in 2 of 3."
    )
    assert closing_of([100 * value for value in noisy]).endswith("Noise may hide any step.")


def closing_of(*series: list[float]) -> str:
    """Return the closing sentence of steady series."""
    trends = []
    for values in series:
        points = tuple(CommitPoint(commit=f"c{n}", created=str(n), value=value) for n, value in enumerate(values))
        key = Key(implementation="x", workload="w", fingerprint="f", clock="wall", anchors="f wall")
        trends.append(Trend(CommitSeries(key=key, workload=workload(), machine="m", points=points), ()))
    return closing(trends, lambda trend, change: "")


def test_a_torn_last_line_is_told(repository: Repository, capsys: pytest.CaptureFixture[str]):
    torn = repository.path / "runs/m/3.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"line":"record","rec')
    assert execute(["history", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "3.jsonl, line 7: the last line was cut off" in err
    assert json.loads(out)["trends"]


def test_a_broken_file_that_was_named_is_an_error_however_it_is_spelt(repository: Repository, capsys):
    (repository.path / "runs/m/3.jsonl").write_text("garbage\n")
    assert execute(["history"]) == 0
    assert execute(["history", "./runs/m/3.jsonl"]) == 2
    assert "3.jsonl, line 1" in capsys.readouterr().err
