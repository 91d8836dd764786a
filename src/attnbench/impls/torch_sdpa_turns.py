"""Backends of scaled_dot_product_attention pinned by several threads at once, in about a microsecond.

torch's flags belong to the process: two threads inside its `sdpa_kernel` see each other's, and restore them in the
wrong order, which pins the process for good. Here threads that want one backend share the pin, others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Condition

FLAGS = ("cudnn", "flash", "mem_efficient", "math", "overrideable")


class _Turn:
    """Whose turn it is, how many threads are inside, and what the flags were before."""

    def __init__(self) -> None:
        self.condition = Condition()
        self.flag = ""
        self.inside = 0
        self.before: list[bool] = []


_TURN = _Turn()


class Pinned:
    """`with Pinned("math"): ...`; the flag is one of FLAGS. One object serves every thread and call."""

    __slots__ = ("_flag",)

    def __init__(self, flag: str) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        with _TURN.condition:
            while _TURN.inside and _TURN.flag != self._flag:
                _TURN.condition.wait()
            if not _TURN.inside:
                _TURN.flag, _TURN.before = self._flag, [get() for get, _ in _switches()]
                for name, was, (_, put) in zip(FLAGS, _TURN.before, _switches()):
                    if was != (name == self._flag):
                        put(name == self._flag)
            _TURN.inside += 1

    def __exit__(self, *error: object) -> None:
        with _TURN.condition:
            _TURN.inside -= 1
            if not _TURN.inside:
                for name, was, (_, put) in zip(FLAGS, _TURN.before, _switches()):
                    if was != (name == self._flag):
                        put(was)
                _TURN.condition.notify_all()


@cache
def _switches() -> tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...]:
    """Readers and writers of the flags, those that `sdpa_kernel` itself uses."""
    import torch

    return tuple(
        (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}")) for name in FLAGS
    )
