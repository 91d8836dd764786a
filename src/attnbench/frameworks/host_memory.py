"""Memory of the host that this process may take: a container's limit counts, not the machine behind it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

GROUPS = Path("/sys/fs/cgroup")
FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and use, of control groups of version 2 and 1."""


class HostMemory(NamedTuple):
    """Bytes in all, and those that can still be had."""

    total: int
    available: int


def host_memory(groups: Path = GROUPS) -> HostMemory:
    """The machine's, or the control group's where that is less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit_file, use_file in FILES:
        limit, used = _number(groups / limit_file), _number(groups / use_file)
        if limit is not None and limit < machine.total:
            total, available = min(total, limit), max(0, min(available, limit - (used or 0)))
    return HostMemory(total, available)


def _number(path: Path) -> int | None:
    """`max`, or a file that is not there, is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
