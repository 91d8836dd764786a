"""Backends of scaled_dot_product_attention pinned by several threads at once, in about a microsecond.

torch's flags belong to the process: two threads inside its `sdpa_kernel` see each other's, and restore them in the
wrong order, which pins the process for good. Here threads that want one backend share the pin, others wait for it. A
thread that pins again inside its own block gives the outer pin up meanwhile, so that nobody waits while holding one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Condition, Lock, local

FLAGS = ("cudnn", "flash", "mem_efficient", "math", "overrideable")
USERS = FLAGS[:4]
"""Those that `torch.backends.cuda.enable_*_sdp` sets."""


class _Turn:
    """Whose turn it is, which threads are inside, and how to undo what the first of them changed."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.over = Condition(self.lock)
        self.flag = ""
        self.inside: set[object] = set()
        """One token of each thread: entering or leaving twice, as after an interrupt, changes nothing."""
        self.undo: dict[str, tuple[Callable[[bool], None], bool]] = {}

    def restore(self) -> None:
        """Put the flags back; what an exception leaves undone is done by the next call."""
        while self.undo:
            name, (put, was) = next(iter(self.undo.items()))
            put(was)
            del self.undo[name]


class _Held(local):
    """The pins of one thread, the outermost first; only the last is in force."""

    def __init__(self) -> None:
        self.pins: list[Pinned] = []
        self.token = object()


_TURN = _Turn()
_HELD = _Held()


class Pinned:
    """`with Pinned("math"): ...`; the flag is one of FLAGS. One object serves every thread and call.

    An exception while it waits or switches, KeyboardInterrupt included, leaves the pin around it in force, and the
    flags as they were once that one has ended.
    """

    __slots__ = ("_flag", "_switches")

    def __init__(self, flag: str) -> None:
        import torch

        self._flag = flag
        self._switches = [  # those that `sdpa_kernel` itself uses
            (name, getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
            for name in FLAGS
        ]

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
    """Put the flags back if no other thread holds this pin."""
    with _TURN.lock:
        _TURN.inside.discard(_HELD.token)
        if not _TURN.inside:
            _TURN.over.notify_all()
            _TURN.restore()


def _back_to(pins: list[Pinned]) -> None:
    """Give up whatever was taken by halves, and take the pin that is left."""
    _give_up()
    if pins:
        pins[-1]._take()


def switched_off() -> tuple[str, ...]:
    """Return the flags that are off outside of our own pins: what the user decided."""
    with _TURN.lock:
        undo = _TURN.undo
        return tuple([name for name, get in _readers() if not (undo[name][1] if name in undo else get())])


@cache
def _readers() -> tuple[tuple[str, Callable[[], bool]], ...]:
    import torch

    return tuple((name, getattr(torch._C, f"_get_{name}_sdp_enabled")) for name in USERS)
