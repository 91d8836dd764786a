"""The command line as a user meets it: a process of its own, with its exit code, stdout and stderr."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

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
