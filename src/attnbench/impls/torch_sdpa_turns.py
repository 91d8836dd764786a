"""Backends of scaled_dot_product_attention pinned by several threads at once.

torch's flags belong to the process: two threads inside `sdpa_kernel` see each other's, and restore them in the wrong
order, which would pin the process for good. Here threads that want one backend share the pin, others wait for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import Condition
from typing import Any

_turn = Condition()
_held: list[tuple[Any, AbstractContextManager[Any]]] = []
"""The backend whose turn it is with torch's own context, once for each thread inside."""


class Pinned:
    """`with Pinned(SDPBackend.MATH): ...`"""

    __slots__ = ("_backend",)

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        from torch.nn.attention import sdpa_kernel

        with _turn:
            while _held and _held[0][0] is not self._backend:
                _turn.wait()
            if _held:
                _held.append(_held[0])
            else:
                context = sdpa_kernel(self._backend)
                context.__enter__()
                _held.append((self._backend, context))

    def __exit__(self, *error: object) -> None:
        with _turn:
            _, context = _held.pop()
            if not _held:
                context.__exit__(None, None, None)
                _turn.notify_all()
