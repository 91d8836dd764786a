"""The command line as a user meets it, with its exit code, stdout and stderr: in this process, or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from attnbench.cli import execute

PATIENCE_S = 120.0


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """`python -m attnbench ...` in a folder; what it caches lies beside the folder, for the tests that follow."""
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-m", "attnbench", *map(str, arguments)],
        cwd=folder,
        env={**inherited, "ATTNBENCH_CACHE": str(folder.parent / "attnbench-cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for its end; a traceback is never an answer."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in out + err, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def attnbench(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in this process, which has imported everything; its workers are processes."""
    words, out, err = [str(argument) for argument in arguments], StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setenv("ATTNBENCH_CACHE", str(folder.parent / "attnbench-cache"))
        patch.delenv("XLA_FLAGS", raising=False)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            code = execute(words)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert "Traceback" not in out.getvalue() + err.getvalue(), err.getvalue()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def wait_for(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Look until there is something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError("it never happened")


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Processes that a command has started."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child.pid for child in children if "attnbench.run.worker" in child.cmdline()]


def alive(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
