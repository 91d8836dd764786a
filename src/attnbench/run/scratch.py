"""Temporary folders that a later process removes if their owner was killed before it could."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

PREFIX = "attnbench-"
OWNER = ".owner"
"""File in each folder, locked as long as its owner lives: a lock dies with its process, whatever ended it."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary folder that is gone afterwards; those of killed processes are removed first."""
    remove_abandoned()
    with TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        place = Path(folder).resolve()
        with owned(place / OWNER):
            yield place


def remove_abandoned() -> None:
    """Remove folders whose owner is dead."""
    for owner in Path(gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        remove_if_abandoned(owner)


@contextmanager
def owned(marker: Path) -> Iterator[None]:
    """Make a file that is locked until the end, and says which system its owner runs on."""
    with marker.with_name(f"{marker.name}.new").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(this_system())
        file.flush()
        os.rename(file.name, marker)  # never there without its lock
        yield


def remove_if_abandoned(marker: Path) -> None:
    """Remove the folder of an `owned` file if its owner is dead.

    A lock is seen by all processes of one kernel, in whatever container they are, and perhaps by no other machine: what
    was made on another one, or before it was started anew, is left alone.
    """
    try:
        with marker.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == this_system():
                shutil.rmtree(marker.parent, ignore_errors=True)
    except OSError:  # its owner lives, or it belongs to another user
        return


def this_system() -> str:
    """Return what tells this running kernel from every other one; the name of the machine if there is no such thing."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
