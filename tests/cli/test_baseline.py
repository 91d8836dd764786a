"""`attnbench baseline`: what it keeps, lists, shows and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from record_factory import CPU, ok, unsupported, workload

from attnbench.cli import execute
from attnbench.results.run_file import RunWriter, new_header

HERE = msgspec.structs.replace(CPU, commit="abc123abc123")


def write_run(path: Path, median: float) -> None:
    writer = RunWriter(path, new_header("0", "quick"))
    names = {"torch.sdpa": median, "torch.eager": 9e6, "anchor.matmul": 1e5, "anchor.copy": 1e5}
    records = [ok(name, [ns, ns], environment=HERE) for name, ns in names.items()]
    writer.write([*records, unsupported("torch.fa3", "needs cuda")])
    writer.close()


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first.jsonl", 5e6)
    write_run(tmp_path / "second.jsonl", 7e6)


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict]:
    capsys.readouterr()
    assert execute(["baseline", "list", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_save_keeps_what_is_timed_and_says_what_not(capsys: pytest.CaptureFixture[str]):
    assert execute(["baseline", "save", "first", "--note", "release 1"]) == 0
    out = capsys.readouterr().out
    assert f"kept     {HERE.fingerprint}/torch.sdpa/{workload().id}" in out
    assert f"skipped  torch.fa3/{workload().id}: unsupported: needs cuda" in out
    assert "2 kept in baselines, 1 skipped." in out
    rows = listed(capsys)
    assert [(row["commit"], row["note"]) for row in rows] == [("abc123abc123", "release 1")] * 2
    assert listed(capsys, "-k", "sdpa")[0]["median_ns"] == 5e6


def test_only_update_replaces(capsys: pytest.CaptureFixture[str]):
    assert execute(["baseline", "save", "-k", "sdpa"]) == 0
    assert execute(["baseline", "save", "second.jsonl", "-k", "sdpa"]) == 1
    assert "`attnbench baseline update` replaces it" in capsys.readouterr().out
    assert [row["median_ns"] for row in listed(capsys)] == [5e6]
    assert execute(["baseline", "update", "second.jsonl", "-k", "sdpa", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (len(document["written"]), document["skipped"]) == (1, [])
    assert [row["median_ns"] for row in listed(capsys)] == [7e6]


def test_the_folder_is_an_option_or_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert execute(["baseline", "save", "--dir", "kept"]) == 0
    assert len(list((tmp_path / "kept").rglob("*.json"))) == 2
    (tmp_path / "attnbench.toml").write_text('baselines_dir = "kept"\n')
    assert len(listed(capsys)) == 2


def test_show_takes_an_id_or_enough_of_it(capsys: pytest.CaptureFixture[str]):
    execute(["baseline", "save", "--note", "why not"])
    (row,) = listed(capsys, "-k", "sdpa")
    assert execute(["baseline", "show", row["id"]]) == 0
    out = capsys.readouterr().out
    assert "why not" in out
    assert "anchor.copy" in out
    assert execute(["baseline", "show", "sdpa", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["record"]["implementation"] == "torch.sdpa"
    assert execute(["baseline", "show", "torch"]) == 2
    assert '"torch" matches 2 baselines: add words' in capsys.readouterr().err


def test_a_missing_baseline_comes_with_the_commands_that_make_one(capsys: pytest.CaptureFixture[str]):
    assert execute(["baseline", "show", "torch.sdpa"]) == 2
    err = capsys.readouterr().err
    assert 'there is no baseline "torch.sdpa" in baselines' in err
    assert "`attnbench baseline save latest` make one" in err
    assert err.count("\n") == 1
    assert execute(["baseline", "list"]) == 0
    assert "`attnbench baseline save latest` make one" in capsys.readouterr().out


def test_the_list_is_a_table(capsys: pytest.CaptureFixture[str]):
    execute(["baseline", "save", "--note", "[odd] note"])
    capsys.readouterr()
    assert execute(["baseline", "list"]) == 0
    out = capsys.readouterr().out
    assert "5.00 ms" in out
    assert "[odd] note" in out


def test_a_torn_line_of_the_run_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = Path("torn.jsonl")
    records = [ok(name, [1e5, 1e5]) for name in ("torch.x", "anchor.matmul", "anchor.copy")]
    RunWriter(path, new_header("0", "s")).write(records)
    path.write_bytes(path.read_bytes() + b'{"line":')
    assert execute(["baseline", "save", "torn.jsonl"]) == 0
    assert "torn.jsonl, line 6: the last line was cut off" in capsys.readouterr().err


@pytest.mark.parametrize("commit", ["abc123abc123", "abc123abc123+dirty"])
def test_uncommitted_changes_are_told(tmp_path, monkeypatch, capsys, commit):
    monkeypatch.chdir(tmp_path)
    environment = msgspec.structs.replace(CPU, commit=commit)
    names = ("mine", "anchor.matmul", "anchor.copy")
    RunWriter(Path("r.jsonl"), new_header("0", "own")).write(
        [ok(n, [1e6, 1e6], environment=environment) for n in names]
    )
    assert execute(["baseline", "save", "r.jsonl"]) == 0
    told = "r.jsonl was measured with uncommitted changes (mine)" in " ".join(capsys.readouterr().err.split())
    assert told == commit.endswith("+dirty")
    assert [row["commit"] for row in listed(capsys)] == [commit]
