"""One measurement at a time: a lock file in the user's cache folder that dies with its process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from threading import get_ident
from typing import BinaryIO

from attnbench.errors import UsageError
from attnbench.run.ceilings import cache_folder

POLL_S = 0.2
LOCK_PATIENCE_S = 600.0
"""What is asked for in Python waits so long for another measurement on this machine to end; a command does not wait."""
_held_here: dict[str, int] = {}
"""Locks of this process, and the thread that holds each."""


class CannotLock(UsageError):
    """The lock file itself cannot be had."""


@contextmanager
def machine_lock(name: str = "gate", doing: str = "", patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of that name; raises UsageError if another living process has it and keeps it for `patience_s`.

    `doing` is what others are told: a gate, a run, a comparison.
    """
    path = cache_folder() / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise _no_lock(path, error) from error
    with file:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise _held(name, file) from error
                time.sleep(POLL_S)
            except OSError as error:
                raise _no_lock(path, error) from error
        _write(file, f"{os.getpid()} {datetime.now():%H:%M} {doing or name}")
        _held_here[name] = get_ident()
        try:
            yield
        finally:
            _held_here.pop(name, None)
            _write(file, "")


@contextmanager
def measuring(doing: str, patience_s: float = 0.0) -> Iterator[list[str]]:
    """Hold the machine's lock unless this thread does already (a bisection compares) or this process is a worker of one
    that does; yields what should be noted, such as that no lock can be had here."""
    notes: list[str] = []
    if _held_here.get("gate") == get_ident() or os.environ.get("ATTNBENCH_WORKER"):
        yield notes
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(machine_lock(doing=doing, patience_s=patience_s))
        except CannotLock as error:
            notes.append(f"nothing keeps other measurements away: {error}")
        yield notes


def _write(file: BinaryIO, text: str) -> None:
    file.truncate(0)
    file.write(text.encode())
    file.flush()


def _held(name: str, file: BinaryIO) -> UsageError:
    file.seek(0)
    pid, _, rest = file.read().decode(errors="replace").partition(" ")
    since, _, doing = rest.partition(" ")
    who = f" (pid {pid}, since {since})" if since else ""
    stop = f"`kill {pid}` if it hangs" if since else "stop it"
    return UsageError(f"another attnbench {doing or name}{who} is measuring on this machine: wait for it, or {stop}.")


def _no_lock(path: object, error: OSError) -> CannotLock:
    return CannotLock(
        f"cannot lock {path} ({error.strerror or error}): set ATTNBENCH_CACHE to a folder that can be written."
    )
