"""Processes with their descendants: end a process with all it has started, and end this one with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(socket: int, last: Callable[[], object] = lambda: None) -> None:
    """End this process when the other end of its socket is closed, whatever its main thread is doing.

    `last` is called before that.
    """
    hung_up = select.poll()
    hung_up.register(socket, 0)  # no events: only a hang-up wakes it

    def watch() -> None:
        hung_up.poll()
        last()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def keep_children_together() -> None:
    """Make orphans among this process's descendants its children, so that ending it finds them (Linux only).

    Also wake this process if its parent dies while it is stopped, so that it can see the closed socket.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


REFRESH_S = 0.1
"""Seconds between two searches through all processes, which take milliseconds. Between them, signals go to the known
process groups; a process that leaves its group meanwhile is found by the next search."""


def mapped_files() -> list[str]:
    """Return the files mapped into this process, such as shared libraries; empty if the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # only Linux has this file
        return []
    names = {parts[5].removesuffix(" (deleted)") for line in lines if len(parts := line.split(maxsplit=5)) == 6}
    return sorted(name for name in names if name.startswith(os.sep))


class ProcessTree:
    """A process, its descendants and their process groups; orphans count if the root adopts them.

    The system reuses the ids of ended processes. So a process is identified by its id and its start time, and checked
    before every signal.
    """

    def __init__(self, root: int | psutil.Process) -> None:
        """Take the process that has this id now, if there is one."""
        self._known: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            self._known = [root if isinstance(root, psutil.Process) else psutil.Process(root)]
        self._root = next(iter(self._known), None)
        self._groups: dict[int, list[psutil.Process]] = {}
        """Process groups, with the known processes of each."""
        self._looked_at = float("-inf")

    def stop(self) -> None:
        """Stop all processes of the tree, without ending them."""
        self._send(signal.SIGSTOP)
        if self._look():
            self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all processes of the tree run on."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """End all processes of the tree, and those that they start meanwhile."""
        self._look(at_once=True)
        self._send(signal.SIGSTOP)
        while self._look(at_once=True):
            self._send(signal.SIGSTOP)
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for group, members in self._groups.items():
            # A group keeps its number as long as one of its processes exists.
            if any(_group(one) == group for one in members):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)
        for one in self._known:
            if one.is_running():  # False if its number is another's by now
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one.pid, number)

    def _look(self, at_once: bool = False) -> bool:
        """Search for descendants, unless that was done a moment ago; return whether there are new ones."""
        now = time.monotonic()
        if not at_once and now - self._looked_at < REFRESH_S:
            return False
        self._looked_at, before = now, set(self._known)
        self._known = [] if self._root is None else [self._root, *descendants(self._root)]
        self._groups = {}
        for one in self._known:
            group = _group(one)
            if group not in (None, os.getpgrp()):
                self._groups.setdefault(group, []).append(one)
        return not before.issuperset(self._known)


def _group(process: psutil.Process) -> int | None:
    """Return the process group of a process, or None if the process has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(process.pid)
        return group if process.is_running() else None
    return None


def descendants(root: int | psutil.Process) -> list[psutil.Process]:
    """Return the running processes that a process has started, directly or not."""
    try:
        return (root if isinstance(root, psutil.Process) else psutil.Process(root)).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_descendants() -> None:
    """End everything that this process has started."""
    for child in descendants(os.getpid()):
        ProcessTree(child).kill()
