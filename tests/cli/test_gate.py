"""`attnbench gate` and `attnbench compare` on the command line: exit codes, dispatch, files, bad requests."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import gate_factory
import pytest
from git_repository import Repository
from record_factory import incorrect, ok, unsupported

from attnbench.cli import execute
from attnbench.comparing.baselines import save
from attnbench.errors import UsageError
from attnbench.results.run_file import RunWriter, new_header
from attnbench.run.machine import machine_lock


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Gates and comparisons that answer at once; what they were asked is kept."""
    monkeypatch.chdir(tmp_path)
    orders: list = []
    answers = {"report": gate_factory.report(gate_factory.case()), "comparison": gate_factory.comparison()}

    def gate_refs(order, watch):
        orders.append(order)
        return answers["report"]

    def compare(*given, **named):
        orders.append((given, named))
        return answers["comparison"]

    monkeypatch.setattr("attnbench.comparing.gate.gate_refs", gate_refs)
    monkeypatch.setattr("attnbench.comparing.compare.compare", compare)
    monkeypatch.setattr("attnbench.comparing.compare.compare_refs", compare)
    answers["orders"] = orders
    return answers


GATE = ["gate", "--baseline", "main", "--impl", "numpy.float32"]


@pytest.mark.parametrize(
    "outcome,code", [("pass", 0), ("fail", 1), ("nothing", 3), ("inconclusive", 4), ("untrusted", 5)]
)
def test_each_outcome_has_its_exit_code(asked, outcome, code, capsys):
    asked["report"] = gate_factory.report(gate_factory.case(), outcome=outcome)
    assert execute(GATE) == code
    assert f"exit {code}" in capsys.readouterr().out


@pytest.mark.parametrize("flag,wanted", [("exit", "inconclusive"), ("pass", "pass"), ("fail", "fail")])
def test_what_inconclusive_means_is_handed_on(asked, flag, wanted):
    assert execute([*GATE, "--on-inconclusive", flag]) == 0
    assert asked["orders"][0].on_inconclusive == wanted


def test_words_floors_and_limits_are_handed_on(asked):
    Path("floors.toml").write_text('[[case]]\nimplementation = "numpy.*"\nfloor = 0.07\nreason = "measured"\n')
    assert execute([*GATE, "-k", "train", "--thresholds", "floors.toml", "--budget", "9", "--threads", "1"]) == 0
    (order,) = asked["orders"]
    assert (order.suite, order.budget_s, order.threads, order.implementations) == ("ci", 9.0, 1, ("numpy.float32",))
    assert {workload.pass_ for workload in order.workloads} == {"train"}
    assert order.floors("numpy.float32", "any") == 0.07
    assert order.floors("torch.sdpa", "any") == 0.01


SUITE = """name = "own"
description = "two lengths"
[[workload]]
batch = 1
q_len = [{lengths}]
heads = 2
head_dim = 16
"""
FLOOR = '[[case]]\nimplementation = "kern:*"\nfloor = {}\nreason = "noisy"\n'


def test_what_the_baseline_asked_for_and_the_gate_does_not_is_told(asked, tmp_path):
    """A change that takes its slow case out of the settings, or raises its floor, does not pass without a word."""
    for folder, names, lengths, floor in (
        ("then", '"kern:attend", "kern:gone", "numpy.no-longer"', "64, 128", 0.02), (".", '"kern:attend"', "64", 0.5),
    ):  # fmt: skip
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "attnbench.toml").write_text(f'implementations = [{names}]\nthresholds = "floors.toml"\n')
        Path(folder, "own.toml").write_text(SUITE.format(lengths=lengths))
        Path(folder, "floors.toml").write_text(FLOOR.format(floor))
    gate = ["gate", "--baseline", "main", "--suite", "own.toml"]
    for words in ([], ["--thresholds", "floors.toml"], ["-k", "kern"], ["--impl", "kern:attend"]):
        assert execute([*gate, *words]) == 0
    found = [order.relaxed(tmp_path / "then") for order in asked["orders"]]
    lost, raised = found[0]
    assert lost.startswith("asked for kern:gone, numpy.no-longer, b1-t128-h2-d16-full-float32-forward, which")
    assert raised == "has lower floors: kern:attend on b1-t64-h2-d16-full-float32-forward (2 %, here 50 %)"
    assert found[1] == found[0]
    assert found[2] == ["asked for kern:gone, which this gate does not measure", raised]
    assert found[3][0].startswith("asked for b1-t128")
    assert asked["orders"][0].relaxed(tmp_path) == []
    (tmp_path / "then" / "own.toml").write_text("broken")
    (tmp_path / "then" / "floors.toml").unlink()
    lost, raised = asked["orders"][0].relaxed(tmp_path / "then")
    assert "b1-t128" not in lost
    assert "(1 %, here 50 %)" in raised
    (tmp_path / "then" / "attnbench.toml").write_text("broken")
    assert asked["orders"][0].relaxed(tmp_path / "then") == []


def test_implementations_come_from_the_settings(asked):
    Path("attnbench.toml").write_text('implementations = ["my_package:attend"]\n')
    assert execute(["gate", "--baseline", "main"]) == 0
    assert asked["orders"][0].implementations == ("my_package:attend",), "and nothing beside them"


def test_without_a_list_only_what_the_repository_brings_is_gated(asked, tmp_path, capsys, monkeypatch):
    """attnbench's own are the same in every ref of another repository."""
    Repository(tmp_path).commit("first")
    names = {"numpy.float32": "attnbench.impls.numpy"}
    monkeypatch.setattr(import_module("attnbench.cli.gate"), "swept_names", lambda: list(names))
    monkeypatch.setattr("attnbench.registry.module_of", names.__getitem__)
    assert execute(["gate", "--baseline", "main"]) == 2
    assert "none of its code would be measured" in capsys.readouterr().err
    assert not asked["orders"]
    names["numpy.mine"] = "minepkg"
    assert execute(["gate", "--baseline", "main"]) == 0
    assert asked["orders"][0].implementations == ("numpy.mine",)
    Path("src/attnbench").mkdir(parents=True)
    assert execute(["gate", "--baseline", "main"]) == 0
    assert asked["orders"][1].implementations == tuple(names)


def test_files_for_ci_are_written_case_by_case(asked, monkeypatch):
    def killed(order, watch):
        order.on_progress(gate_factory.report(gate_factory.case("regression"), outcome="interrupted"))
        assert json.loads(Path("out/gate.json").read_text())["cases"][0]["status"] == "regression"
        raise KeyboardInterrupt

    monkeypatch.setattr("attnbench.comparing.gate.gate_refs", killed)
    assert execute([*GATE, "--ci", "out"]) == 130
    assert sorted(path.name for path in Path("out").iterdir()) == ["gate.json", "gate.md", "gate.xml"]


def test_compare_waits_for_no_other_measurement(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    with machine_lock(doing="run"):
        monkeypatch.setattr("attnbench.run.machine._held_here", {})
        assert execute(["compare", "torch.eager", "torch.sdpa"]) == 2
    assert "another attnbench run (pid" in capsys.readouterr().err
    assert not asked["orders"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "file"))
    assert execute(["compare", "torch.eager", "torch.sdpa"]) == 0
    assert "other measurements on this machine cannot be kept out" in capsys.readouterr().err


def test_files_for_ci_are_written_and_the_document_is_alone_on_stdout(asked, capsys):
    asked["report"] = gate_factory.report(gate_factory.case("regression"), outcome="fail")
    assert execute([*GATE, "--ci", "out", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "fail"
    assert sorted(path.name for path in Path("out").iterdir()) == ["gate.json", "gate.md", "gate.xml"]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(asked, capsys):
    Path("taken").write_text("a file")
    assert execute([*GATE, "--ci", "taken"]) == 2
    assert not asked["orders"]
    assert "taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words,hint",
    [
        (["gate"], "no baseline"),
        (["gate", "--baseline", "main", "--current", "gone.jsonl"], "holds measurements"),
        (["gate", "--baseline", "main", "--suite", "nowhere"], "no suite called"),
        (["gate", "--baseline", "main", "--impl", "torch.sdap"], "Near: torch.sdpa"),
        (["gate", "--baseline", "main", "--thresholds", "gone.toml"], "gone.toml"),
        (["compare", "torch.sdpa"], "compare torch.sdpa with what?"),
        (["compare", "torch.sdpa", "torch.eager", "--baseline", "main"], "or one in two refs"),
    ],
)
def test_bad_requests_are_one_sentence(asked, words, hint, capsys):
    assert execute(words) == 2
    told = capsys.readouterr().err
    assert hint in told
    assert "Traceback" not in told


def test_a_real_gate_outside_a_repository_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert execute(GATE) == 2
    assert "repository" in capsys.readouterr().err
    Repository(tmp_path).commit("first")
    assert execute(["gate", "--baseline", "nowhere", "--impl", "numpy.float32"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verdict,words,code",
    [
        ("slower", [], 0),
        ("slower", ["--fail-on", "slower"], 1),
        ("faster", ["--fail-on", "slower"], 0),
        ("inconclusive", ["--fail-on", "slower"], 0),
        ("inconclusive", ["--fail-on", "inconclusive"], 4),
    ],
)
def test_compare_exits_0_unless_asked(asked, verdict, words, code, capsys):
    asked["comparison"] = gate_factory.comparison(verdict, 1.1)
    assert execute(["compare", "torch.eager", "torch.sdpa", *words]) == code
    assert "torch.sdpa" in capsys.readouterr().out


@pytest.mark.parametrize("shapes", [["512"], ["512", "1024"]])
def test_a_wrong_candidate_fails_where_a_slower_one_would(asked, shapes):
    wrong = {"record_a": ok("torch.eager"), "record_b": incorrect("torch.sdpa", "zeros")}
    asked["comparison"] = gate_factory.comparison(None, reason="zeros", **wrong)
    words = ["compare", "torch.eager", "torch.sdpa", "--seq-len", *shapes]
    assert execute(words) == 3
    assert execute([*words, "--fail-on", "slower"]) == 1
    wrong["record_a"] = unsupported("torch.eager", "no")
    asked["comparison"] = gate_factory.comparison(None, reason="no", **wrong)
    assert execute([*words, "--fail-on", "slower"]) == 1


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (UsageError("a build fails"), 2)])
def test_what_is_finished_is_printed_whatever_ends_a_comparison(asked, monkeypatch, capsys, error, code):
    answers = iter([gate_factory.comparison(), gate_factory.comparison(), error])

    def compare(*given, **named):
        if isinstance(found := next(answers), BaseException):
            raise found
        return found

    monkeypatch.setattr("attnbench.comparing.compare.compare", compare)
    words = ["compare", "torch.eager", "torch.sdpa", "--seq-len", "64", "128", "256", "--json"]
    assert execute(words) == code
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize("words", [["--suite", "nowhere"], ["--impl", "torch.sdap"], ["--thresholds", "gone.toml"]])
def test_a_gate_that_is_refused_leaves_no_files_of_an_earlier_one(asked, words):
    assert execute([*GATE, "--ci", "out"]) == 0
    Path("out/other.txt").write_text("not ours")
    assert execute(["gate", "--baseline", "main", "--ci", "out", *words]) == 2
    assert [path.name for path in Path("out").iterdir()] == ["other.txt"]


def test_compare_of_refs_hands_on_what_was_asked(asked):
    assert execute(["compare", "mine.py:attend", "--baseline", "main", "--framework", "numpy", "--threads", "1"]) == 0
    ((_, named),) = asked["orders"]
    wanted = {"baseline": "main", "current": "HEAD", "implementation": "mine.py:attend", "framework": "numpy"}
    assert wanted.items() <= named.items()


def test_a_bug_has_an_exit_code_of_its_own(asked, monkeypatch, capsys):
    def break_down(*given):
        raise RuntimeError("unthought of")

    monkeypatch.setattr("attnbench.comparing.gate.gate_refs", break_down)
    assert execute(GATE) == 70
    assert "bug in attnbench" in capsys.readouterr().err


@pytest.fixture
def branches(asked, tmp_path):
    """A repository with branches that are called as folders in it are: one of anything, one of baselines."""
    made = Repository(tmp_path)
    made.commit("first")
    for name in ("docs", "kept", "baselines"):
        made.git("branch", name)
    Path("docs").mkdir()
    Path("docs/notes.json").write_text('{"schema": 1}')
    records = [ok(name, [1e5, 1.1e5, 1e5]) for name in ("torch.x", "anchor.matmul", "anchor.copy")]
    save(records, Path("kept"))
    RunWriter(Path("run.jsonl"), new_header("0", "s")).write(records)
    return asked


def test_a_branch_called_as_a_folder_is_a_branch(branches):
    assert execute(["gate", "--baseline", "docs", "--impl", "numpy.float32"]) == 0
    (order,) = branches["orders"]
    assert order.baseline == "docs"


@pytest.mark.parametrize("folder", ["kept", "./kept", "kept/"])
def test_a_folder_of_baselines_is_one_though_a_branch_has_its_name(branches, folder):
    assert execute(["gate", "--baseline", folder, "--current", "run.jsonl", "--json"]) == 0
    assert not branches["orders"]


def test_a_path_is_a_folder_though_a_branch_has_its_name(branches, capsys):
    assert execute(["gate", "--baseline", "./docs", "--impl", "numpy.float32"]) == 2
    assert "./docs holds measurements, so --current must be a run file too" in capsys.readouterr().err
    assert not branches["orders"]


def test_the_settings_name_a_folder_never_a_branch(branches, capsys):
    Path("baselines").mkdir()
    assert execute(["gate", "--impl", "numpy.float32"]) == 2
    assert "baselines holds measurements" in capsys.readouterr().err
