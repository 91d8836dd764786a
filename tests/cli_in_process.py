"""The command line in the process of the tests, which has imported everything: exit code, stdout and stderr."""

from __future__ import annotations

import signal
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from attnbench.cli import execute


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
