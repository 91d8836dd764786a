"""One measurement at a time: a lock file in the user's cache folder that dies with its process.

Everything that times takes it: `gate` and `bisect` refuse at once if another process has it, runs wait a while for it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from threading import get_ident
from typing import BinaryIO

from attnbench.errors import UsageError
from attnbench.run.ceilings import cache_folder
from attnbench.store.runfile import slug

WAIT_S, LIBRARY_WAIT_S = 60.0, 600.0
"""How long a run waits for the lock: one of the command line, and one of the Python interface, which tests of a project
may call in several processes."""
PAUSE_S = 0.2
_held_here: dict[str, int] = {}
"""Locks of this process, and the thread that holds each."""


class CannotLock(UsageError):
    """The lock file itself cannot be had, so nobody knows who else is measuring."""


@contextmanager
def machine_lock(
    name: str = "gate", command: str = "", wait_s: float = 0.0, tell: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock of that name; a UsageError if another living process has it and keeps it for `wait_s` seconds.

    `command` is what the others are told; `tell` is called once if there is something to wait for. The file is of this
    machine, because several machines may share a home folder.
    """
    path = cache_folder() / f"{name}-{slug(platform.node())}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise _no_lock(path, error) from error
    with file:
        deadline, told = time.monotonic() + wait_s, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                holder, stop = _holder(name, file)
                if time.monotonic() >= deadline:
                    told_how = f"is measuring on this machine: wait for it, or {stop}."
                    raise UsageError(f"{holder} {told_how}") from error
                if tell is not None and not told:
                    tell(f"waiting up to {wait_s:.0f} s for {holder}, which is measuring on this machine")
                told = True
                time.sleep(PAUSE_S)
            except OSError as error:
                raise _no_lock(path, error) from error
        _write(file, f"{os.getpid()} {datetime.now():%H:%M} {command or name}")
        _held_here[name] = get_ident()
        try:
            yield
        finally:
            _held_here.pop(name, None)
            _write(file, "")


@contextmanager
def measuring(command: str, wait_s: float = 0.0, tell: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Hold the machine's lock unless this thread does already (a bisection compares) or this process is a worker of one
    that does; yields what should be noted, such as that no lock can be had here."""
    notes: list[str] = []
    if _held_here.get("gate") == get_ident() or os.environ.get("ATTNBENCH_WORKER"):
        yield notes
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(machine_lock(command=command, wait_s=wait_s, tell=tell))
        except CannotLock as error:
            notes.append(f"nothing keeps other measurements away: {error}")
        yield notes


def _write(file: BinaryIO, text: str) -> None:
    file.truncate(0)
    file.write(text.encode())
    file.flush()


def _holder(name: str, file: BinaryIO) -> tuple[str, str]:
    """Return who holds the lock, and how to end it."""
    file.seek(0)
    pid, since, command, *_ = [*file.read().decode(errors="replace").split(" "), "", "", ""]
    if not since:
        return f"another attnbench {name}", "stop it"
    return f"another attnbench {command or name} (pid {pid}, since {since})", f"`kill {pid}` if it hangs"


def _no_lock(path: object, error: OSError) -> CannotLock:
    return CannotLock(
        f"cannot lock {path} ({error.strerror or error}): set ATTNBENCH_CACHE to a folder that can be written."
    )
