"""A process with everything it started, as one thing: stop it, let it go on, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

REFRESH_S = 0.1
"""Looking through all processes takes milliseconds; between two looks, signals go to the process groups known so far.
What leaves its group meanwhile is found by the next look."""


class ProcessTree:
    """A process, its descendants and their process groups; orphans count if the root adopts them (lifeline.py)."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._pids: list[int] = [root]
        self._groups: list[int] = []
        self._looked_at = float("-inf")

    def stop(self) -> None:
        """Take the processor away from all of them."""
        self._send(signal.SIGSTOP)
        if self._look():
            self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all of them go on."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """End all of them; what they start meanwhile is looked for until nothing new is there."""
        self._look(at_once=True)
        self._send(signal.SIGSTOP)
        while self._look(at_once=True):
            self._send(signal.SIGSTOP)
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _look(self, at_once: bool = False) -> bool:
        """Look for descendants anew unless that was done a moment ago; returns whether there are new ones."""
        now = time.monotonic()
        if not at_once and now - self._looked_at < REFRESH_S:
            return False
        self._looked_at, before = now, set(self._pids)
        self._pids = [self._root, *descendants(self._root)]
        groups = set()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                groups.add(os.getpgid(pid))
        self._groups = sorted(groups - {os.getpgrp()})
        return not before.issuperset(self._pids)


def descendants(root: int) -> list[int]:
    """Processes that a process has started, directly or not, and that still exist."""
    try:
        return [child.pid for child in psutil.Process(root).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_descendants() -> None:
    """End everything that this process has started."""
    for pid in descendants(os.getpid()):
        ProcessTree(pid).kill()
