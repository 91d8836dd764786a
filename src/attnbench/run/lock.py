"""One measurement at a time: a lock file in the user's cache folder that dies with its process.

Everything that times holds it. `gate`, `bisect` and `compare` are refused at once if another process has it; runs and
calls from Python wait for a while.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from io import FileIO
from threading import get_ident

from attnbench.errors import UsageError
from attnbench.results.run_file import slug
from attnbench.run.ceilings import cache_folder

POLL_S = 0.2
RUN_PATIENCE_S, LIBRARY_PATIENCE_S = 60.0, 600.0
"""How long runs wait for the lock: those of the command line, and those of the Python interface, which the tests of a
project may call from several processes."""
_held_here: dict[str, int] = {}
"""Locks of this process, and the thread that holds each."""


class CannotLock(UsageError):
    """The lock file itself cannot be had."""


@contextmanager
def machine_lock(
    name: str = "gate", doing: str = "", patience_s: float = 0.0, tell: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock of that name; raises UsageError if another living process has it and keeps it for `patience_s`.

    `doing` is what others are told: a gate, a run, a comparison. `tell` is called once if there is something to wait
    for. The file is of this machine alone, because several machines may share a home folder.
    """
    path = cache_folder() / f"{name}-{slug(platform.node())}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise _no_lock(path, error) from error
    with file:
        deadline, told = time.monotonic() + patience_s, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                holder, stop = _holder(name, file)
                if time.monotonic() >= deadline:
                    raise UsageError(f"{holder} is measuring on this machine: wait for it, or {stop}.") from error
                if tell is not None and not told:
                    tell(f"waiting up to {patience_s:.0f} s for {holder}, which is measuring on this machine")
                told = True
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
def measuring(doing: str, patience_s: float = 0.0, tell: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Hold the machine's lock unless this thread does already (a bisection compares) or this process is a worker of one
    that does; yields what should be noted, such as that no lock can be had here."""
    notes: list[str] = []
    if _held_here.get("gate") == get_ident() or os.environ.get("ATTNBENCH_WORKER"):
        yield notes
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(machine_lock(doing=doing, patience_s=patience_s, tell=tell))
        except CannotLock as error:
            notes.append(f"nothing keeps other measurements away: {error}")
        yield notes


def _write(file: FileIO, text: str) -> None:
    """Say who holds the lock. It is held all the same if the disk is full."""
    with suppress(OSError):
        file.truncate(0)
        file.write(text.encode())


def _holder(name: str, file: FileIO) -> tuple[str, str]:
    """Return who holds the lock, and how to end it."""
    file.seek(0)
    pid, _, rest = file.read().decode(errors="replace").partition(" ")
    since, _, doing = rest.partition(" ")
    if not since:
        return f"another attnbench {name}", "stop it"
    return f"another attnbench {doing or name} (pid {pid}, since {since})", f"`kill {pid}` if it hangs"


def _no_lock(path: object, error: OSError) -> CannotLock:
    return CannotLock(
        f"cannot lock {path} ({error.strerror or error}): set ATTNBENCH_CACHE to a folder that can be written."
    )
