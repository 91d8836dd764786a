"""Temporary folders that a later process removes if their owner was killed before it could."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

PREFIX = "attnbench-"
OWNER = ".owner"
"""File in each folder, locked as long as its owner lives: a lock dies with its process, whatever ended it."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary folder that is gone afterwards; those of killed processes are removed first."""
    remove_abandoned()
    with TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        place = Path(folder).resolve()
        with (place / f"{OWNER}.new").open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.rename(owner.name, place / OWNER)  # never there without its lock
            yield place


def remove_abandoned() -> None:
    """Remove folders whose owner is dead."""
    for owner in Path(gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        try:
            with owner.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent, ignore_errors=True)
        except OSError:  # its owner lives, or it belongs to another user
            continue
