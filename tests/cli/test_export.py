"""`attnbench export`: what goes where, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs
from record_factory import CPU, ok, unsupported, workload

from attnbench.cli import execute
from attnbench.results.run_file import RunWriter, new_header

FAST = ok("torch.sdpa", [5e6, 6e6, 7e6])


def write_run(path: Path, *records) -> None:
    writer = RunWriter(path, new_header("0", "quick"))
    writer.write(records)
    writer.close()


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first.jsonl", FAST, unsupported("torch.fa3", "needs cuda"))
    write_run(tmp_path / "second.jsonl", ok("torch.eager", [9e6, 9e6], workload(64)))


def test_text_goes_to_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str]):
    assert execute(["export", "--format", "csv"]) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["run"], row["status"]) for row in found] == [("first", "ok"), ("first", "unsupported")]
    assert execute(["export", "first", "--format", "bencher", "-o", "-"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [FAST.cell.id]


def test_several_runs_are_one_table(capsys: pytest.CaptureFixture[str]):
    assert execute(["export", "first", "second.jsonl", "--format", "csv", "-k", "torch"]) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["run"] for row in found} == {"first", "second"}
    assert len(found) == 3


def test_several_commits_are_told(capsys: pytest.CaptureFixture[str]):
    for name in ("aaaa", "bbbb+dirty"):
        record = ok(name, [1e6] * 5, environment=structs.replace(CPU, commit=name))
        write_run(Path(f"{name}.jsonl"), record, ok("unknown", [1e6] * 5))
    assert execute(["export", "aaaa.jsonl", "bbbb+dirty.jsonl", "--format", "bencher"]) == 0
    told = "warning: these times are of 3 commits (aaaa, unknown, bbbb+dirty): bencher has room for one at most."
    assert told in capsys.readouterr().err
    assert execute(["export", "aaaa.jsonl", "--format", "bencher", "-k", "aaaa"]) == 0
    assert "commits" not in capsys.readouterr().err


def test_several_machines_are_told(capsys: pytest.CaptureFixture[str]):
    gpu = structs.replace(CPU, device="cuda", device_name="Test GPU")
    elsewhere = structs.replace(gpu, device_name="Other GPU", cores=16)
    for name, environment in {"cpu": CPU, "gpu": gpu, "elsewhere": elsewhere}.items():
        write_run(Path(f"{name}.jsonl"), ok(name, [1e6] * 5, environment=environment))
    assert execute(["export", "cpu.jsonl", "gpu.jsonl", "elsewhere.jsonl", "--format", "bencher"]) == 0
    told = "warning: these times are of 2 machines (Test CPU 9000, Other GPU): bencher has room for one at most."
    assert told in capsys.readouterr().err
    assert execute(["export", "cpu.jsonl", "gpu.jsonl", "--format", "bencher"]) == 0
    assert "machines" not in capsys.readouterr().err


def test_a_file_is_written_and_told_on_stderr(capsys: pytest.CaptureFixture[str]):
    assert execute(["export", "second.jsonl", "--format", "github-action-benchmark", "-o", "out/bench.json"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "wrote out/bench.json\n")
    assert json.loads(Path("out/bench.json").read_text())[0]["value"] == 9e6


def test_what_is_no_text_takes_the_name_of_the_run(capsys: pytest.CaptureFixture[str]):
    assert execute(["export", "first", "--format", "sqlite"]) == 0
    with closing(sqlite3.connect("first.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (2,)
    assert execute(["export", "first", "--format", "sqlite", "-o", "-"]) == 2
    assert "sqlite is not a text format: name a file with -o" in capsys.readouterr().err


def test_a_cell_of_several_runs_is_kept_once_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "third.jsonl", ok("torch.sdpa", [3e6, 3e6]))
    assert execute(["export", "first", "third.jsonl", "--format", "bencher"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[FAST.cell.id]["latency"]["value"] == 3e6
    assert "note: 1 timed cells are in several runs" in captured.err


def test_nothing_timed_is_not_silent(capsys: pytest.CaptureFixture[str]):
    assert execute(["export", "first", "--format", "pytest-benchmark", "-k", "fa3"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing was timed" in captured.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere", "--format", "csv"], 'there is no run file "nowhere"'),
        (["first", "--format", "csv", "-k", "jax"], 'no record with "jax" in its id'),
        (["first", "--format", "yaml"], "yaml"),
        (["first"], "--format"),
        (["second.jsonl", "--format", "csv", "-o", "second.jsonl"], "second.jsonl is one of the run files to read"),
        (["first", "--format", "csv", "-o", "second.jsonl"], "second.jsonl is a run file, which is never replaced"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    before = Path("second.jsonl").read_bytes()
    assert execute(["export", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert Path("second.jsonl").read_bytes() == before


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert execute(["export", "first", "--format", "parquet"]) == 2
    err = capsys.readouterr().err
    assert 'pip install "attnbench[report]"' in err
    assert err.count("\n") == 1


def test_a_torn_run_is_exported_with_a_warning(capsys: pytest.CaptureFixture[str]):
    path = Path("second.jsonl")
    path.write_bytes(path.read_bytes() + b'{"line":"rec')
    assert execute(["export", "second.jsonl", "--format", "csv"]) == 0
    captured = capsys.readouterr()
    assert "warning: second.jsonl" in captured.err
    assert captured.out.count("torch.eager") >= 1
