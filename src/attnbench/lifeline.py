"""A process that was started for another one ends with it."""

from __future__ import annotations

import os
import select
import threading


def die_with_parent(socket: int) -> None:
    """End this process when the other end of its socket is gone, whatever the main thread is busy with."""
    hung_up = select.poll()
    hung_up.register(socket, 0)  # no events: only a hang-up wakes it

    def watch() -> None:
        hung_up.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
