"""Standing in front of a function that models call: `capture` and `redirect_sdpa` are handlers of such hooks.

While a hook has handlers, the function is replaced wherever a loaded module holds it at its top level, so that code
which imported the name itself is reached too. A replacement that somebody keeps afterwards is the function again.
Replacing is process-wide: all threads see it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any

from attnbench.errors import UsageError

Handler = Callable[..., Any]
"""`handler(proceed, *args, **kwargs)`; `proceed(*args, **kwargs)` is what would have been called without it."""


class Meanwhile:
    """A setting of the process with a value of its own while blocks run; the last one out puts back what was there."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> None:
        self._get, self._put, self._value = get, put, value
        self._blocks, self._before = 0, None
        self._lock = RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the block runs, the setting has the value."""
        with self._lock:
            if not self._blocks:
                self._before = self._get()
            self._put(self._value)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    self._put(self._before)


class Hook:
    """Where handlers of one function are put; the latest is asked first."""

    def __init__(
        self,
        function: Callable[..., Any],
        home: str,
        *,
        spare: tuple[str, ...] = (),
        original: Callable[..., Any] | None = None,
    ) -> None:
        """`home` is the module that models take it from; modules named like one of `spare` keep the function.

        `original` is called in its place where the function itself would not do while it is replaced.
        """
        self._function, self._home, self._spare = function, home, spare
        self._original = original or function
        self._handlers: tuple[Handler, ...] = ()
        self._places: list[tuple[dict[str, Any], str]] = []
        self._lock = RLock()
        self.replacement = self._made()

    def _made(self) -> Callable[..., Any]:
        @wraps(self._function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._call(len(self._handlers), args, kwargs)

        return replacement

    def _call(self, level: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers = self._handlers[:level]
        if not handlers:
            return self._original(*args, **kwargs)
        return handlers[-1](lambda *a, **k: self._call(level - 1, a, k), *args, **kwargs)

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """While the block runs, every call goes through the handler."""
        with self._lock:
            if not self._handlers:
                self._replace()
            self._handlers = (*self._handlers, handler)
        try:
            yield
        finally:
            with self._lock:
                at = len(self._handlers) - 1 - self._handlers[::-1].index(handler)
                self._handlers = self._handlers[:at] + self._handlers[at + 1 :]
                if not self._handlers:
                    self._restore()

    def _replace(self) -> None:
        name = self._function.__name__
        if getattr(sys.modules[self._home], name) is not self._function:
            raise UsageError(f"{self._home}.{name} has been replaced by something else already: undo that first.")
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(self._spare) and module_name != self._home:
                continue
            held = getattr(module, "__dict__", {})
            self._places += [(held, key) for key, value in list(held.items()) if value is self._function]
        for held, key in self._places:
            held[key] = self.replacement

    def _restore(self) -> None:
        for held, key in self._places:
            if held.get(key) is self.replacement:
                held[key] = self._function
        self._places.clear()
