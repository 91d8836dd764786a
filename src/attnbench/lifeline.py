"""A process that was started for another one ends with it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(socket: int, last: Callable[[], object] = lambda: None) -> None:
    """End this process when the other end of its socket is gone, whatever the main thread is busy with; `last` comes
    before that."""
    hung_up = select.poll()
    hung_up.register(socket, 0)  # no events: only a hang-up wakes it

    def watch() -> None:
        hung_up.poll()
        last()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def keep_children_together() -> None:
    """Let orphans among this process's descendants become its children, so that whoever ends it finds them; and wake
    this process if its parent dies while it is stopped, so that it can see the hang-up. Linux only."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
