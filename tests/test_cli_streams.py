"""Where output goes may be closed, speak ASCII only, or go away: that is never a bug of ours."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cli_process import alive, finish, start, wait_for, workers
from hostile_text import danger
from record_factory import CPU, incorrect, noisy, ok

from attnbench.cli import execute
from attnbench.results.run_file import RunWriter

SMALL = ["--batch", "1", "--heads", "1", "--head-dim", "8", "--seq-len", "16", "--framework", "numpy"]
PYTHON = f"{sys.executable} -m attnbench"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    where = msgspec.structs.replace(CPU, device_name="Prüfling 中")
    writer = RunWriter.create(tmp_path, "cpu", "quick")
    writer.write([ok("torch.sdpa", noisy(1e6, 1), environment=where), incorrect("größer", "wrong ✗")])
    writer.close()
    return writer.path


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, run_file: Path, tmp_path: Path):
    commands = [f"show {run_file}", f"export {run_file} -f csv -o out.csv", "show nothing"]
    codes = []
    for command in commands:
        done = subprocess.run(
            f"{PYTHON} {command} {closed}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        codes.append(done.returncode)
        assert "Traceback" not in done.stderr
        assert not (done.stdout and ">&-" in closed.split())
    assert codes == [0, 0, 2]
    assert execute(["export", str(run_file), "-f", "csv", "-o", str(tmp_path / "again.csv")]) == 0
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "again.csv").read_bytes()


def test_an_error_never_takes_the_place_of_a_closed_stream(tmp_path: Path):
    """With stderr closed, nothing of it lands on stdout, and no file gets the number of a standard stream."""
    code = (
        "import os, sys\nfrom attnbench.cli import execute\nexecute(['show', 'nothing'])\n"
        "sys.exit(os.open('new', os.O_CREAT | os.O_WRONLY) < 3)"
    )
    done = subprocess.run(
        f'{sys.executable} -c "{code}" <&- 2>&-', shell=True, cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_streams_that_lack_characters(encoding: str, run_file: Path, tmp_path: Path):
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    for command in (["show", "--detail"], ["show", "--json"], ["export", "-f", "bencher"]):
        words = [sys.executable, "-m", "attnbench", command[0], str(run_file), *command[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        text = done.stdout.decode(encoding)
        if command[-1] in ("--json", "bencher"):
            assert json.loads(text)


def test_a_closed_terminal_leaves_nothing_behind(tmp_path: Path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = _hanging(tmp_path, temporary)
    pids = wait_for(lambda: any(temporary.iterdir()) and workers(process))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert finish(process).returncode == 130
    wait_for(lambda: not any(map(alive, pids)))
    assert list(temporary.iterdir()) == []


def test_who_asked_to_go_on_goes_on(tmp_path: Path):
    """`nohup` ignores the signal for the command."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert execute(["show", "nothing"]) == 2
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_is_no_bug(run_file: Path, tmp_path: Path):
    """Reads and writes of it fail with EIO."""
    own, other = pty.openpty()
    os.close(own)
    command = [sys.executable, "-m", "attnbench", "show", str(run_file)]
    done = subprocess.run(command, stdout=other, stderr=subprocess.PIPE, text=True, check=False)
    os.close(other)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write the output: ")


def _hanging(folder: Path, temporary: Path) -> subprocess.Popen[str]:
    traps = Path(__file__).parent / "run" / "traps.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        return start(folder, "run", "--impl", f"{traps}:hangs", "--against", "numpy.float32", *SMALL)


def test_what_a_kernel_raises_is_no_command(tmp_path: Path):
    (tmp_path / "kernel.py").write_text(
        "def attend(q, k, v):\n"
        "    raise NotImplementedError('no\\n::error file=x.py::forged\\n::stop-commands::t\\x1b]52;c;QQ\\x07 ##[x]')\n"
    )
    options = ["--impl", "kernel.py:attend", "--against", "numpy.float32", "--budget", "0.05", *SMALL]
    done = finish(start(tmp_path, "run", *options))
    assert r"no\n:\x3aerror file=x.py::forged" in done.stdout
    assert not danger(done.stdout)
    assert not danger(done.stderr)
