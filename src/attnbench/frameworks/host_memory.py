"""Memory of the host: what this process may take, what it holds, and how far a call makes it grow.

A container's limit counts, not the machine behind it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

GROUPS = Path("/sys/fs/cgroup")
FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and use, of control groups of version 2 and 1."""


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Text that sets the high-water mark of resident memory to what is resident now, when written to clear_refs."""

M_PERTURB, FREED = -6, 0x3C
"""glibc's option to fill memory when it is freed with this byte, and when it is handed out with its complement."""
HANDED_OUT = FREED ^ 0xFF
"""Byte of -391 in float32, -390 in bfloat16, -3.9 in float16 and -2.8e18 in float64."""
FRESH_BYTES = 1 << 26
"""Size that malloc takes from the system anew, as zeros, unless it fills it."""


class _Mallinfo(ctypes.Structure):
    """The result of glibc's mallinfo2: ten numbers, of which the fifth is the size of large blocks and the eighth what
    is in use of the heap."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


class HostMemory(NamedTuple):
    """Bytes in total, and bytes still available."""

    total: int
    available: int


def host_memory(groups: Path = GROUPS) -> HostMemory:
    """Return the memory of the machine, or of the control group if that has less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit_file, use_file in FILES:
        limit, used = _number(groups / limit_file), _number(groups / use_file)
        if limit is not None and limit < machine.total:
            total, available = min(total, limit), max(0, min(available, limit - (used or 0)))
    return HostMemory(total, available)


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max` or a missing file, which mean no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def allocated() -> int | None:
    """Return the bytes that the process holds of the C library: large blocks, which malloc took from the system one by
    one, and what is in use of its heap, where large blocks lie too once some were freed.

    Whichever library asked for them counts. None if the C library does not say.
    """
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return None
    function.restype = _Mallinfo
    numbers = function().numbers
    return int(numbers[4] + numbers[7])


def resident_growth(call: Callable[[], Any]) -> int | None:
    """Return by how many bytes a call made the process grow at its peak, at least; None if that cannot be seen.

    The call may have used memory that was free before. Linux only.
    """
    try:
        before = restart_peak()
        output = call()
        grown = status_bytes("VmHWM") - before
    except OSError:
        return None
    del output
    return max(0, grown)


def restart_peak() -> int:
    """Set the high-water mark (VmHWM) to what is resident now, and return that (Linux only, else OSError).

    Freed memory goes back to the system first: if that happened later, it would hide as much of what is allocated then.
    """
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text(RESET_PEAK)
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    """Return a figure of this process's memory, such as VmRSS (Linux)."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


@contextmanager
def filled_memory() -> Iterator[bool]:
    """Fill memory with other numbers than zeros before malloc hands it out, while the block runs; yield whether that
    works here.

    Large blocks come from the system as zeros, so that a call which reads what it has not written may look right.
    """
    libc = ctypes.CDLL(None)
    if not (sys.platform.startswith("linux") and hasattr(libc, "mallopt")):
        yield False
        return
    libc.mallopt(M_PERTURB, FREED)
    try:
        yield _is_filled(libc)
    finally:
        libc.mallopt(M_PERTURB, 0)


def _is_filled(libc: ctypes.CDLL) -> bool:
    """Return whether the C library's malloc fills what it hands out: another one may have taken its place."""
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    libc.malloc.argtypes = (ctypes.c_size_t,)
    block = libc.malloc(FRESH_BYTES)
    if not block:
        return False
    try:
        return ctypes.c_ubyte.from_address(block + FRESH_BYTES // 2).value == HANDED_OUT
    finally:
        libc.free(block)
