"""`run --resume FILE`: the file may be anyone's, and it may still be written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_lab
import msgspec
import pytest
from fake_lab import FakeLab
from record_factory import ok, workload

from attnbench.cli import execute
from attnbench.errors import UsageError
from attnbench.results.run_file import RunWriter, new_header, read_run
from attnbench.run.launch import Request
from attnbench.run.recorder import store_request

EVIL = "from pathlib import Path\nPath('executed').touch()\ndef f(q, k, v):\n    return v\n"
HOLDER = """
import sys
from pathlib import Path
from attnbench.results.run_file import RunWriter
writer = RunWriter(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def write_run(path: Path, **asked: Any) -> None:
    """A run of two lengths that holds the first, with whatever its header asks for."""
    request = Request(workloads=(workload(64), workload(128)), implementations=("torch.sdpa",))
    header = new_header("0", "own", store_request(request) | asked)
    writer = RunWriter(path, header)
    writer.write([ok(name, [1e6, 1e6], workload(64)) for name in ("torch.sdpa", "anchor.matmul", "anchor.copy")])
    writer.close()


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a stranger's file and the code that it names, and nothing that would keep it from running."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLab:
    return fake_lab.install(monkeypatch, tmp_path)


@pytest.mark.parametrize("reference", ["evil.py:f", "./evil.py:f", "evil_module:f", "sub/../evil.py:f"])
@pytest.mark.parametrize("options", [["--list"], ["--list", "--json"], [], ["--json"], ["--timeout", "9"]])
@pytest.mark.parametrize("in_process", [True, False])
def test_nothing_that_only_a_file_names_is_imported(
    strange: Path, reference: str, options: list[str], in_process: bool, capsys: pytest.CaptureFixture[str]
):
    write_run(Path("r.jsonl"), implementations=["torch.sdpa", reference], in_process=in_process)
    assert execute(["run", "--resume", "r.jsonl", *options]) == 2
    out, err = capsys.readouterr()
    told = " ".join(err.split())
    assert out == ""
    assert f"functions that the command does not name: {reference}." in told
    assert f"If you trust it, run: attnbench run --resume r.jsonl --impl {reference}" in told
    assert not Path("executed").exists()
    assert "evil_module" not in sys.modules


def test_a_matching_hash_is_no_invitation(strange: Path):
    from attnbench.run.user_functions import fingerprint_sources

    write_run(Path("r.jsonl"), implementations=["evil.py:f"])
    lines = Path("r.jsonl").read_bytes().splitlines()
    header = json.loads(lines[0]) | {"sources": fingerprint_sources(["evil.py:f"])}
    Path("r.jsonl").write_bytes(b"\n".join([msgspec.json.encode(header), *lines[1:], b""]))
    assert read_run(Path("r.jsonl")).header.sources
    assert execute(["run", "--resume", "r.jsonl", "--list"]) == 2
    assert not Path("executed").exists()


def test_functions_that_are_named_again_go_on_with_what_the_file_asks(lab: FakeLab, strange: Path):
    write_run(Path("r.jsonl"), implementations=["torch.sdpa", "evil.py:f", "evil_module:f"], budget_s=0.25)
    again = ["--impl", "./evil.py:f", "evil_module:f"]
    assert execute(["run", "--resume", "r.jsonl", *again, "--quiet"]) in (0, 3)
    (request,) = lab.requests
    assert request.implementations == ("torch.sdpa", "./evil.py:f", "evil_module:f")
    assert [one.q_len for one in request.workloads] == [64, 128]
    assert request.budget_s == 0.25
    assert execute(["run", "--resume", "r.jsonl", *again[:2], "--quiet"]) == 2, "all of them, or none"


def test_others_that_are_named_ask_for_something_else(lab: FakeLab, strange: Path):
    write_run(Path("r.jsonl"))
    assert execute(["run", "--resume", "r.jsonl", "--impl", "torch.eager", "--seq-len", "32", "--quiet"]) == 0
    (request,) = lab.requests
    assert (request.implementations, [one.q_len for one in request.workloads]) == (("torch.eager",), [32])


def test_a_file_does_not_decide_where_traces_go_nor_how_long_a_cell_may_hang(
    lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str]
):
    write_run(Path("r.jsonl"), trace=str(strange / "planted" / "traces"), timeout_s=1e9, in_process=True)
    assert execute(["run", "--resume", "r.jsonl"]) == 0
    (request,) = lab.requests
    assert (request.trace, request.timeout_s, request.in_process) == (None, 300.0, False)
    assert not (strange / "planted").exists()
    told = " ".join(capsys.readouterr().err.split())
    assert "planted/traces in r.jsonl is ignored: give --trace again to use it" in told
    assert "timeout_s = 1000000000.0 in r.jsonl is ignored: give --timeout again" in told
    assert "in_process = True in r.jsonl is ignored" in told


def test_the_command_line_decides_them(lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str]):
    write_run(Path("r.jsonl"), trace="planted", timeout_s=5.0)
    assert execute(["run", "--resume", "r.jsonl", "--trace", "mine", "--timeout", "77"]) == 0
    (request,) = lab.requests
    assert (request.trace, request.timeout_s) == (Path("mine"), 77.0)
    assert [one.q_len for one in request.workloads] == [64, 128]
    assert "not taken over" not in capsys.readouterr().err


@pytest.mark.parametrize("what", [[3], [{"a": 1}], [["evil.py:f"]], "evil.py:f"])
def test_a_header_that_names_no_names_is_broken(strange: Path, what: object):
    write_run(Path("r.jsonl"), implementations=what)
    assert execute(["run", "--resume", "r.jsonl", "--list"]) == 2


def test_proposed_commands_name_the_functions_again(lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str]):
    write_run(Path("r.jsonl"), implementations=["torch.sdpa", "my file.py:f"])
    assert execute(["show", "r.jsonl"]) == 0
    assert "`attnbench run --resume r.jsonl --impl 'my file.py:f'`" in " ".join(capsys.readouterr().err.split())
    lab.interrupt_after = 1
    command = ["run", "--impl", "evil.py:f", "--against", "torch.sdpa", "--seq-len", "64", "128", "--trace", "t"]
    assert execute([*command, "--timeout", "12"]) == 130
    out, err = capsys.readouterr()
    path = out.strip().splitlines()[-1]
    told = " ".join(err.split())
    assert f"attnbench run --resume {path} --impl evil.py:f --trace t --timeout 12" in told.replace("- ", "-")


ADDED = ["--impl", "evil.py:f", "--against", "torch.eager", "--seq-len", "32", "48"]
"""What a resumed run may be asked for beside what its file was begun for."""


def proposed(err: str) -> list[str]:
    """The words of the command that an interrupted run ends with."""
    (line,) = (line for line in err.splitlines() if "Continue with: " in line)
    program, *words = shlex.split(line.partition("Continue with: ")[2])
    assert program == "attnbench"
    return words


def asked(lab: FakeLab) -> list[tuple[tuple[str, ...], list[int]]]:
    """Implementations and lengths of every request that was run."""
    return [(one.implementations, [workload.q_len for workload in one.workloads]) for one in lab.requests]


@pytest.mark.parametrize("again", [ADDED, ["--impl", "./evil.py:f"], ["--impl", "evil.py:f", "--seq-len", "16"]])
def test_a_function_that_a_resumed_run_added_must_not_change_either(
    lab: FakeLab, strange: Path, again: list[str], capsys: pytest.CaptureFixture[str]
):
    write_run(Path("r.jsonl"))
    assert execute(["run", "--resume", "r.jsonl", *ADDED, "--quiet"]) == 0
    kept = Path("r.jsonl").read_bytes()
    (strange / "evil.py").write_text(EVIL + "# faster\n")
    capsys.readouterr()
    assert execute(["run", "--resume", "r.jsonl", *again, "--quiet"]) == 2
    assert "evil.py has changed since r.jsonl began" in " ".join(capsys.readouterr().err.split())
    assert Path("r.jsonl").read_bytes() == kept
    (strange / "evil.py").write_text(EVIL)
    assert execute(["run", "--resume", "r.jsonl", *again, "--quiet"]) in (0, 3)


def test_two_functions_do_not_share_a_name_in_one_file(lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str]):
    (strange / "other.py").write_text("# other code\n" + EVIL)
    write_run(Path("r.jsonl"), implementations=["torch.sdpa", "evil.py:f"])
    assert execute(["run", "--resume", "r.jsonl", "--impl", "other.py:f", "--seq-len", "32"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "r.jsonl uses the name f for evil.py:f, and other.py:f would get the same name" in told
    assert lab.requests == []
    assert execute(["run", "--resume", "r.jsonl", "--impl", "other.py:g", "--seq-len", "32", "--quiet"]) == 0
    assert execute(["run", "--resume", "r.jsonl", "--impl", "evil_module:g", "--seq-len", "32", "--quiet"]) == 2


def test_a_file_that_was_only_moved_is_the_same_code(lab: FakeLab, strange: Path):
    write_run(Path("r.jsonl"))
    assert execute(["run", "--resume", "r.jsonl", *ADDED, "--quiet"]) == 0
    (strange / "evil.py").rename(strange / "moved.py")
    moved = ["--impl", "moved.py:f", "--against", "torch.eager", "--seq-len", "64", "--quiet"]
    assert execute(["run", "--resume", "r.jsonl", *moved]) == 0


def test_times_of_a_file_that_nobody_named_are_told_of(lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str]):
    """Older versions did not write down which functions a resumed run had added."""
    write_run(Path("r.jsonl"))
    writer = RunWriter(Path("r.jsonl"))
    writer.write([ok("f", [1e6, 1e6], workload(32))])
    writer.close()
    assert execute(["run", "--resume", "r.jsonl", *ADDED]) == 0
    assert "holds times of f but not its source file: the function may have changed since" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("finished", [0, 1])
def test_the_command_that_is_proposed_goes_on_with_all_that_was_interrupted(
    lab: FakeLab, strange: Path, finished: int, capsys: pytest.CaptureFixture[str]
):
    write_run(Path("r.jsonl"), implementations=["torch.sdpa", "evil_module:f2"], seed=7)
    lab.interrupt_after = finished
    command = [*ADDED, "--trace", "my traces", "--timeout", "12", "--budget", "0.25", "--clock", "wall"]
    assert execute(["run", "--resume", "r.jsonl", *command]) == 130
    words = proposed(capsys.readouterr().err)
    (interrupted,), lab.requests[:], lab.interrupt_after = tuple(lab.requests), [], None
    assert execute(words) in (0, 3)
    first, second = lab.requests
    assert first.implementations == ("torch.sdpa", "evil_module:f2")
    assert [one.q_len for one in first.workloads] == [64, 128]
    assert second == interrupted
    assert {first.timeout_s, second.timeout_s} == {12.0}
    assert read_run(Path("r.jsonl")).against == ("torch.eager",)
    held = {(record.implementation, record.workload.q_len) for record in read_run(Path("r.jsonl")).records}
    assert held >= {("torch.sdpa", 128), ("f", 32), ("f", 48), ("torch.eager", 32), ("torch.eager", 48)}


def test_a_long_command_is_proposed_on_one_line(lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str]):
    folder = strange / ("deep" * 40)
    folder.mkdir()
    (folder / "mine.py").write_text(EVIL)
    lab.interrupt_after = 1
    reference = f"{folder / 'mine.py'}:f"
    assert execute(["run", "--impl", reference, "--against", "torch.sdpa", "--seq-len", "64", "128"]) == 130
    out, err = capsys.readouterr()
    path = out.strip().splitlines()[-1]
    assert proposed(err) == ["run", "--resume", path, "--impl", reference]
    assert execute(["show", path]) == 0
    assert f"`attnbench run --resume {path} --impl {reference}` continues it" in capsys.readouterr().err


def test_a_request_that_was_resumed_twice_is_run_once(lab: FakeLab, strange: Path):
    write_run(Path("r.jsonl"))
    for _ in range(2):
        assert execute(["run", "--resume", "r.jsonl", *ADDED, "--quiet"]) == 0
    lab.requests.clear()
    assert execute(["run", "--resume", "r.jsonl", "--impl", "evil.py:f", "--quiet"]) == 0
    assert asked(lab) == [(("torch.sdpa",), [64, 128]), (("evil.py:f", "torch.eager"), [32, 48])]


def test_what_was_added_is_listed_and_told_of_too(lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str]):
    write_run(Path("r.jsonl"))
    lab.interrupt_after = 1
    assert execute(["run", "--resume", "r.jsonl", *ADDED, "--timeout", "12", "--quiet"]) == 130
    capsys.readouterr()
    assert execute(["show", "r.jsonl"]) == 0
    told = capsys.readouterr().err
    assert "r.jsonl ended before 2 of its 4 shapes" in told
    assert "`attnbench run --resume r.jsonl --impl evil.py:f --timeout 12` continues it" in told
    assert execute(["run", "--resume", "r.jsonl", "--impl", "evil.py:f", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 + 4
    assert [row["runs"] for row in rows if row["implementation"].startswith("torch.")] == [False, True, False, True]


def test_a_request_that_could_not_begin_is_not_written_down(lab: FakeLab, strange: Path, monkeypatch):
    write_run(Path("r.jsonl"))
    before = Path("r.jsonl").read_bytes()

    def refuse(*_: object) -> None:
        raise UsageError("evil.py could not be loaded")

    monkeypatch.setattr("attnbench.run.launch.launch", refuse)
    assert execute(["run", "--resume", "r.jsonl", *ADDED]) == 2
    assert Path("r.jsonl").read_bytes() == before


@pytest.fixture
def holder(strange: Path):
    write_run(Path("r.jsonl"))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "r.jsonl"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_file_that_is_being_written_is_not_resumed(
    holder: subprocess.Popen[str], lab: FakeLab, capsys: pytest.CaptureFixture[str]
):
    with Path("r.jsonl").open("ab") as file:
        file.write(b'{"line":"rec')  # what the other has written so far of its next line
    before = Path("r.jsonl").read_bytes()
    assert execute(["run", "--resume", "r.jsonl"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"r.jsonl is being written by another attnbench (pid {holder.pid}): wait for it" in told
    assert lab.requests == []
    assert Path("r.jsonl").read_bytes() == before
    holder.communicate("")
    assert execute(["run", "--resume", "r.jsonl", "--quiet"]) == 0
    assert len(read_run(Path("r.jsonl")).records) == 6


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_reading_a_file_that_is_being_written_neither_waits_nor_repairs(
    holder: subprocess.Popen[str], lab: FakeLab, json_: list[str]
):
    with Path("r.jsonl").open("ab") as file:
        file.write(b'{"line":"rec')
    before = Path("r.jsonl").read_bytes()
    for command in (["run", "--resume", "r.jsonl", "--list", *json_], ["show", "r.jsonl", *json_]):
        assert execute(command) == 0
    assert Path("r.jsonl").read_bytes() == before


def test_listing_leaves_a_torn_line_alone_and_resuming_repairs_it(lab: FakeLab, strange: Path):
    write_run(Path("r.jsonl"))
    whole = Path("r.jsonl").read_bytes()
    torn = whole + b'{"line":"rec'
    Path("r.jsonl").write_bytes(torn)
    assert execute(["run", "--resume", "r.jsonl", "--list"]) == 0
    assert Path("r.jsonl").read_bytes() == torn
    assert execute(["run", "--resume", "r.jsonl", "--quiet"]) == 0
    assert Path("r.jsonl").read_bytes().startswith(whole + b'{"line":"environment"')
    read_run(Path("r.jsonl"))


@pytest.mark.parametrize(
    "option", [("--budget", "0.1"), ("--threads", "1"), ("--seed", "3"), ("--against", "torch.sdpa")]
)
def test_options_of_measuring_alone_add_nothing_and_are_refused(
    lab: FakeLab, strange: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
):
    """They meant the whole default suite, which was written into the file."""
    write_run(Path("r.jsonl"))
    before = Path("r.jsonl").read_bytes()
    assert execute(["run", "--resume", "r.jsonl", *option]) == 2
    assert f"leave out {option[0]}, or name a suite" in " ".join(capsys.readouterr().err.split())
    assert Path("r.jsonl").read_bytes() == before


def test_a_second_writer_of_this_very_process_is_refused_too(strange: Path):
    write_run(Path("r.jsonl"))
    first = RunWriter(Path("r.jsonl"))
    with pytest.raises(UsageError, match=r"r\.jsonl is being written by another attnbench .this process"):
        RunWriter(Path("r.jsonl"))
    first.close()
    RunWriter(Path("r.jsonl")).close()


def test_an_error_before_anything_ran_leaves_the_file_free(lab: FakeLab, strange: Path, monkeypatch):
    write_run(Path("r.jsonl"))

    def refuse(*_: object) -> None:
        raise UsageError("no")

    monkeypatch.setattr("attnbench.run.launch.launch", refuse)
    assert execute(["run", "--resume", "r.jsonl"]) == 2
    RunWriter(Path("r.jsonl")).close()
