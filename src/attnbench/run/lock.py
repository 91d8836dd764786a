"""One measurement at a time: a lock file in the user's cache folder that dies with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import BinaryIO

from attnbench.errors import UsageError
from attnbench.run.ceilings import cache_folder


@contextmanager
def machine_lock(name: str = "gate") -> Iterator[None]:
    """Hold the lock of that name; a UsageError when another living process has it."""
    path = cache_folder() / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise _no_lock(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _held(name, file) from error
        except OSError as error:
            raise _no_lock(path, error) from error
        _write(file, f"{os.getpid()} {datetime.now():%H:%M}")
        try:
            yield
        finally:
            _write(file, "")


def _write(file: BinaryIO, text: str) -> None:
    file.truncate(0)
    file.write(text.encode())
    file.flush()


def _held(name: str, file: BinaryIO) -> UsageError:
    file.seek(0)
    pid, _, since = file.read().decode(errors="replace").partition(" ")
    who = f" (pid {pid}, since {since})" if since else ""
    stop = f"`kill {pid}` if it hangs" if since else "stop it"
    return UsageError(f"another attnbench {name}{who} is measuring on this machine: wait for it, or {stop}.")


def _no_lock(path: object, error: OSError) -> UsageError:
    return UsageError(
        f"cannot lock {path} ({error.strerror or error}): set ATTNBENCH_CACHE to a folder that can be written."
    )
