"""Bad input: exit code 2, one clear sentence on stderr, no traceback, nothing on stdout."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from record_factory import noisy, ok

from attnbench import registry
from attnbench.cli import execute
from attnbench.results.run_file import RunWriter

NAMES = ["jax.xla", "torch.eager", "torch.sdpa", "torch.sdpa-math"]


@pytest.fixture(autouse=True)
def _known_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "names", lambda: NAMES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run --impl torch.sdap", 'no implementation called "torch.sdap". Near: torch.sdpa'),
        ("run --heads 12:5", "12 query heads cannot share 5 key/value heads"),
        ("run --heads x", "heads"),
        ("run --seq-len 0", "q_len must be"),
        ("run --seq-len two", "two"),
        ("run --dtype float31", "float31"),
        ("run --mask windw:4", "windw"),
        ("run --pass sideways", "sideways"),
        ("run qick", 'no suite called "qick". Near: quick'),
        ("run nowhere.toml", "nowhere.toml: there is no such file"),
        ("run folder.toml", "folder.toml: this is a folder"),
        ("run --framework pytorch", 'no framework called "pytorch"'),
        ("run --against nothing", 'no implementation called "nothing"'),
        ("run --trials 0", "--trials must be more than 0"),
        ("run --seq-len 64.9", '--seq-len takes whole numbers, not "64.9"'),
        ("run --batch 1.7", '--batch takes whole numbers, not "1.7"'),
        ("run --trials 1.5", '--trials takes whole numbers, not "1.5"'),
        ("run --trials inf", "--trials takes whole numbers"),
        ("gate --threads 1.5", "--threads takes whole numbers"),
        ("run --heads", "--heads needs a value"),
        ("run --seq-len --list", "--seq-len needs a value"),
        ("run --dtype", "--dtype needs a value"),
        ("run --impl --seq-len 8", "--impl needs a value"),
        ("run --framework", "--framework needs a value"),
        ("compare torch.eager torch.sdpa --fail-on", "--fail-on needs a value"),
        ("run --seq-len 99999999999999999999 --list", "q_len can be 2147483647 at most"),
        ("run --seq-len 1000000000 --list --mask blocks:random:90", "take larger blocks or fewer tokens"),
        ("run --seq-len 8 --list --mask window:99999999999999999999", "window side can be 2147483647 at most"),
        ("run --seq-len 8 --list --mask documents:2000000000", "covers 2000000000 tokens, kv_len is 8"),
        ("run --heads 1000000007:7 --seq-len 8 --list", "must divide the first (1 or 1000000007)"),
        ("run --budget inf", "budget_s must be more than 0 and finite"),
        ("run --timeout inf", "timeout_s must be more than 0 and finite"),
        ("run --seed 99999999999999999999", "seed must be between 0 and"),
        ("run --threads 99999999999999999999", "threads must be at most 65536"),
        ("compare torch.eager torch.sdpa --budget inf", "budget_s must be a finite number of seconds above 0"),
        ("tune --minutes inf", "--minutes must be more than 0 and finite"),
        ("run --shard 3/2", "--shard takes i/n"),
        ("run --tag none", "tagged none"),
        ("run -k zzz", "zzz"),
        ("run --resume none.jsonl", 'there is no run file "none.jsonl"'),
        ("run --sequence-length 12", "--sequence-length"),
        ("show none.jsonl", "none.jsonl"),
        ("show", "there is no run file"),
        ("list workloads nothing", 'no suite called "nothing"'),
        ("verify --impl nothing", 'no implementation called "nothing"'),
        ("verify --family nothing", "family nothing"),
        ("verify --family dilated --impl torch.eager", "no implementation named by --impl is of the family dilated"),
        ("verify models-e2e", 'not "models-e2e": a suite is named by --suite models-e2e'),
        ("doctor quick", 'doctor does not take "quick": see `attnbench doctor --help`'),
        ("frobnicate", "frobnicate"),
    ],
)
def test_usage_errors(command: str, expected: str, capsys: pytest.CaptureFixture[str]):
    assert execute(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "taken").write_text("a file")
    assert execute(["run", "--impl", "torch.sdpa", "--seq-len", "64", "--out", "taken", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("error: cannot write taken")


def test_unwritable_trace_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "taken").write_text("a file")
    assert execute(["run", "--impl", "torch.sdpa", "--seq-len", "64", "--trace", "taken", "--quiet"]) == 2
    assert "cannot write taken" in (err := capsys.readouterr().err)
    assert err.endswith("Choose another folder with --trace.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["tables", "json"])
def test_a_full_disk_under_stdout(form: list[str], tmp_path: Path):
    writer = RunWriter.create(tmp_path, "cpu", "quick")
    writer.write([ok("torch.sdpa", noisy(1e6, 1))])
    writer.close()
    command = [sys.executable, "-m", "attnbench", "show", str(writer.path), *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write the output: ")
    assert done.stderr.count("\n") == 1


def test_what_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def too_much(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(import_module("attnbench.cli.run"), "select_workloads", too_much)
    assert execute(["run"]) == 2
    assert capsys.readouterr().err == (
        "error: the request needs more memory than this machine has: use smaller shapes.\n"
    )


def test_broken_run_file_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.jsonl").write_text(
        '{"line":"header","schema":1,"attnbench":"0","created":"now"}\nnonsense\n{"line":"record"}\n'
    )
    assert execute(["show", "bad.jsonl"]) == 2
    assert "bad.jsonl, line 2" in capsys.readouterr().err


def test_broken_suite_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.toml").write_text("[[workload]]\nbatch = 1\nq_len = = 3\n")
    assert execute(["run", "bad.toml"]) == 2
    assert "line 3" in capsys.readouterr().err


def test_run_without_stored_request_cannot_resume_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "old.jsonl").write_text('{"line":"header","schema":1,"attnbench":"0","created":"now"}\n')
    assert execute(["run", "--resume", "old.jsonl"]) == 2
    assert "give the suite and options again" in capsys.readouterr().err


def test_help_loads_no_framework():
    code = (
        "import sys\nfrom attnbench.cli import execute\nexecute(['run', '--help'])\n"
        "sys.exit(bool({'torch', 'jax', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_module_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "attnbench", "frobnicate"], capture_output=True, check=False, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
