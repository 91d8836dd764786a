"""A process that was started for another one ends with it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


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
