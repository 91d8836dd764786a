"""Commands and scripts in the process of the tests, which has imported everything; their workers are processes."""

from __future__ import annotations

import runpy
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from attnbench.cli import execute

ROOT = Path(__file__).parents[1]


@contextmanager
def _surroundings(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """The folder and the variables that `cli_process.start` gives to a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if folder != ROOT:  # beside a checkout nothing is written
            patch.setenv("ATTNBENCH_CACHE", str(folder.parent / "attnbench-cache"))
        patch.delenv("XLA_FLAGS", raising=False)
        yield patch


def attnbench(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; a traceback is never an answer."""
    words, out, err = [str(argument) for argument in arguments], StringIO(), StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with _surroundings(folder), redirect_stdout(out), redirect_stderr(err):
        try:
            code = execute(words)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert "Traceback" not in out.getvalue() + err.getvalue(), err.getvalue()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def script(path: Path, *arguments: str, folder: Path | None = None) -> list[str]:
    """Run a Python file as `python FILE ARGUMENTS` would, and return the lines that it prints."""
    out = StringIO()
    with _surroundings(folder or path.parent) as patch, redirect_stdout(out):
        patch.setattr("sys.argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue().splitlines()
