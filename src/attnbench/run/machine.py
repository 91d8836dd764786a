"""State of this machine and user that outlives a run: cache folder, measurement lock, temporary folders, AMX cap.

Everything that times holds the lock, so that one measurement runs at a time; the lock ends with its process. `gate`,
`bisect` and `compare` are refused at once if another process holds it; runs and calls from Python wait for a while.

A processor that advertises matrix instructions (AMX) but traps on them kills torch in its first bfloat16 product; some
virtual machines do. `isa_cap` tries this in a child process, once per machine, and limits what oneDNN may use.
"""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from tempfile import gettempdir
from threading import get_ident

from attnbench.errors import UsageError
from attnbench.files import remove_folder
from attnbench.frameworks import installed
from attnbench.results.run_file import slug

POLL_S = 0.2
RUN_PATIENCE_S, LIBRARY_PATIENCE_S = 60.0, 600.0
"""Seconds that runs wait for the lock: those of the command line, and those of the Python interface, which the tests of
a project may call from several processes."""
_held_here: dict[str, int] = {}
"""Locks that this process holds, with the thread of each."""


def cache_folder() -> Path:
    """Return the folder for results that can be measured again."""
    base = os.environ.get("ATTNBENCH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attnbench"


class CannotLock(UsageError):
    """A lock file that cannot be opened or locked on this file system."""


@contextmanager
def machine_lock(
    name: str = "gate", doing: str = "", patience_s: float = 0.0, tell: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock of that name; raises UsageError if another process still holds it after `patience_s` seconds.

    `doing` is shown to processes that wait: a gate, a run, a comparison. `tell` is called once if there is something to
    wait for. The file is named after this machine, because several machines may share a home folder.
    """
    path = cache_folder() / f"{name}-{slug(platform.node())}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise _no_lock(path, error) from error
    with file:
        deadline, announced = time.monotonic() + patience_s, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                holder, stop = _holder(name, file)
                if time.monotonic() >= deadline:
                    raise UsageError(f"{holder} is measuring on this machine: wait for it, or {stop}.") from error
                if tell is not None and not announced:
                    tell(f"waiting up to {patience_s:.0f} s for {holder}, which is measuring on this machine")
                announced = True
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
    """Hold the machine's lock, unless this thread holds it already (a bisection compares) or this process is a worker
    of the holder. Yields notes for the user, such as that no lock can be had here."""
    notes: list[str] = []
    if _held_here.get("gate") == get_ident() or os.environ.get("ATTNBENCH_WORKER"):
        yield notes
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(machine_lock(doing=doing, patience_s=patience_s, tell=tell))
        except CannotLock as error:
            notes.append(f"other measurements on this machine cannot be kept out: {error}")
        yield notes


def _write(file: FileIO, text: str) -> None:
    """Write the holder's name into the lock file. The lock is held all the same if the disk is full."""
    with suppress(OSError):
        file.truncate(0)
        file.write(text.encode())


def _holder(name: str, file: FileIO) -> tuple[str, str]:
    """Return a description of the lock's holder, and how to end it."""
    file.seek(0)
    pid, _, rest = file.read().decode(errors="replace").partition(" ")
    since, _, doing = rest.partition(" ")
    if not since:
        return f"another attnbench {name}", "stop it"
    return f"another attnbench {doing or name} (pid {pid}, since {since})", f"`kill {pid}` if it hangs"


def _no_lock(path: object, error: OSError) -> CannotLock:
    return CannotLock(f"cannot lock {path} ({error.strerror or error}): set ATTNBENCH_CACHE to a writable folder.")


PREFIX = "attnbench-"
OWNER = ".owner"
"""Name of a file in each folder that is locked while its owner lives, since a lock ends with its process."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder that is removed afterwards; folders of killed processes are removed first."""
    remove_abandoned()
    place = Path(gettempdir()).resolve() / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    try:  # its name is known before it is made, so an interruption at any moment leaves nothing behind
        place.mkdir(mode=0o700)
        with owned(place / OWNER):
            yield place
    finally:
        remove_folder(place)


def remove_abandoned() -> None:
    """Remove the temporary folders whose owner is dead."""
    for owner in Path(gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        remove_if_abandoned(owner)


@contextmanager
def owned(marker: Path) -> Iterator[None]:
    """Hold a lock on a new file that names the running system of its owner."""
    with marker.with_name(f"{marker.name}.new").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(this_system())
        file.flush()
        os.rename(file.name, marker)  # never there without its lock
        yield


def remove_if_abandoned(marker: Path) -> None:
    """Remove the folder of an `owned` file if its owner is dead.

    All processes of one kernel see the lock, in any container, but other machines may not. So folders that were made on
    another machine, or before a restart, are left alone.
    """
    try:
        with marker.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == this_system():
                remove_folder(marker.parent)
    except OSError:  # its owner lives, or it belongs to another user
        return


def this_system() -> str:
    """Return the id of the running kernel, or the machine's name if the system has no such id."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


VARIABLE = "ONEDNN_MAX_CPU_ISA"
CAP = "AVX512_CORE_FP16"
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def isa_cap() -> dict[str, str]:
    """Return the variables that keep torch from using instructions that trap here; empty on a healthy machine."""
    try:
        if VARIABLE in os.environ or "amx_bf16" not in Path("/proc/cpuinfo").read_text() or not installed("torch"):
            return {}
    except OSError:  # only Linux has this file
        return {}
    note = cache_folder() / f"amx-{platform.node()}-{platform.release()}-{version('torch')}"
    try:
        trapped = note.read_text() == "trapped"
    except OSError:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=120)
        trapped = done.returncode == -signal.SIGILL
        with suppress(OSError):  # if this fails, the next run probes again
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text("trapped" if trapped else "fine")
    return {VARIABLE: CAP} if trapped else {}
