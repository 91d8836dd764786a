"""Pins of SDPA's backend that several threads can use at once, in about a microsecond.

torch's flags belong to the process: two threads inside its `sdpa_kernel` see each other's flags and restore them in the
wrong order, which pins the process for good. Here threads that need one backend share the pin, and others wait. A
thread that pins again inside its own block releases the outer pin meanwhile, so that nobody waits while holding a pin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Condition, Lock, local

FLAGS = ("cudnn", "flash", "mem_efficient", "math", "overrideable")
"""Flags of backends; `torch.backends.cuda.enable_*_sdp` sets all but the last."""


class _Turn:
    """The flag that is pinned now, the threads inside, and how to undo the changes that the first of these threads
    made."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.over = Condition(self.lock)
        self.flag = ""
        self.inside: set[object] = set()
        """One token of each thread: entering or leaving twice, as after an interrupt, changes nothing."""
        self.undo: dict[str, tuple[Callable[[bool], None], bool]] = {}

    def restore(self) -> None:
        """Restore the flags; after an exception the next call restores the rest."""
        while self.undo:
            name, (put, was) = next(iter(self.undo.items()))
            put(was)
            del self.undo[name]


class _Held(local):
    """The pins of a thread, the outermost first; only the last is active."""

    def __init__(self) -> None:
        self.pins: list[Pinned] = []
        self.token = object()


_TURN = _Turn()
_HELD = _Held()


class Pinned:
    """Context manager that pins a backend, `with Pinned("math"): ...`; the flag is one of FLAGS.

    One object serves every thread and call. If an exception, KeyboardInterrupt included, occurs while a thread waits or
    switches, the pin around it stays in force, and the flags are restored once that pin has ended.
    """

    __slots__ = ("_flag", "_switches")

    def __init__(self, flag: str) -> None:
        self._flag, self._switches = flag, _switches()

    def __enter__(self) -> None:
        pins = _HELD.pins
        depth = len(pins)
        try:
            if pins:
                _give_up()
            self._take()
            pins.append(self)
        except BaseException:
            del pins[depth:]
            _back_to(pins)
            raise

    def __exit__(self, *error: object) -> None:
        pins = _HELD.pins
        pins.pop()
        try:
            _give_up()
            if pins:
                pins[-1]._take()
        except BaseException:
            _back_to(pins)
            raise

    def _take(self) -> None:
        """Wait until no thread holds another pin, then set the flags if this one is the first."""
        with _TURN.lock:
            while _TURN.inside and _TURN.flag != self._flag:
                _TURN.over.wait()
            if not _TURN.inside:
                _TURN.restore()
                _TURN.flag = self._flag
                for name, get, put in self._switches:
                    wanted = name == self._flag
                    if get() is not wanted:
                        _TURN.undo[name] = put, not wanted
                        put(wanted)
            _TURN.inside.add(_HELD.token)


def _give_up() -> None:
    """Restore the flags if no other thread holds this pin."""
    with _TURN.lock:
        _TURN.inside.discard(_HELD.token)
        if not _TURN.inside:
            _TURN.over.notify_all()
            _TURN.restore()


def _back_to(pins: list[Pinned]) -> None:
    """Release a pin that was only partly taken, and take the remaining pin again."""
    _give_up()
    if pins:
        pins[-1]._take()


def switched_off() -> tuple[str, ...]:
    """Return the flags that are off outside of our own pins, by the user's decision."""
    with _TURN.lock:
        undo, public = _TURN.undo, _switches()[:-1]
        return tuple([name for name, get, _ in public if not (undo[name][1] if name in undo else get())])


@cache
def _switches() -> list[tuple[str, Callable[[], bool], Callable[[bool], None]]]:
    """Return the name of each flag, and the functions that read and set it, which `sdpa_kernel` itself uses."""
    import torch

    return [
        (name, getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
        for name in FLAGS
    ]
