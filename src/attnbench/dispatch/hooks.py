"""Hooks on functions that models call, such as torch's SDPA; `capture` and `redirect_sdpa` are handlers of hooks.

While a hook has handlers, the function is replaced wherever a loaded module holds it at its top level, so that code
which imported the name itself is reached too. A replacement that code keeps afterwards behaves as the function again.
Replacing is process-wide: all threads see it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from threading import RLock
from typing import Any

from attnbench.errors import UsageError

Handler = Callable[..., Any]
"""`handler(proceed, *args, **kwargs)`; `proceed(*args, **kwargs)` is what would have been called without it."""


class Hook:
    """Handlers of one function, of which the latest is called first."""

    def __init__(
        self,
        function: Callable[..., Any],
        home: str,
        *,
        spare: tuple[str, ...] = (),
        original: Callable[..., Any] | None = None,
    ) -> None:
        """Wrap a function of the module `home`; modules whose name begins with one of `spare` keep the function.

        `original` is called in place of the function, if that would not work while it is replaced.
        """
        self._function, self._home, self._spare = function, home, spare
        self._original = original or function
        self._handlers: tuple[Handler, ...] = ()
        self._places: list[tuple[dict[str, Any], str]] = []
        self._lock = RLock()

        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._call(len(self._handlers), args, kwargs)

        self.replacement = replacement

    def _call(self, level: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers = self._handlers[:level]
        if not handlers:
            return self._original(*args, **kwargs)
        return handlers[-1](lambda *a, **k: self._call(level - 1, a, k), *args, **kwargs)

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Pass every call to the handler while the block runs."""
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


class Meanwhile:
    """A process-wide setting that has another value while blocks run; the last block to end restores it."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> None:
        self._get, self._put, self._value = get, put, value
        self._blocks, self._before = 0, None
        self._lock = RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Give the setting the value while the block runs."""
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


class _Depth(threading.local):
    """Number of attnbench's implementations that the thread is inside of."""

    depth = 0


_INSIDE = _Depth()


class OwnRun:
    """Context around the run of an implementation, whose own calls of torch's functions are never redirected."""

    def __enter__(self) -> None:
        _INSIDE.depth += 1

    def __exit__(self, *error: object) -> None:
        _INSIDE.depth -= 1


OWN_RUN = OwnRun()


def in_own_run() -> bool:
    """Return whether the calling thread is inside an implementation of attnbench."""
    return _INSIDE.depth > 0


def torch_sdpa(*args: Any, **kwargs: Any) -> Any:
    """Call torch's own `scaled_dot_product_attention`, also while it is replaced."""
    import torch

    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if mask is not None and type(mask).__name__ == "CausalBias":
        # This bias asks whether the function is the one in torch.nn.functional, which may be the replacement.
        now = torch.nn.functional.scaled_dot_product_attention
        return type(mask).__torch_function__(now, (type(mask),), args, kwargs)
    return torch._C._nn.scaled_dot_product_attention(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def sdpa_hook() -> Hook:
    """Return the hook on `F.scaled_dot_product_attention`; modules of attnbench and torch keep torch's function."""
    import torch

    function = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
    return Hook(function, "torch.nn.functional", spare=("torch.", "attnbench."), original=torch_sdpa)


@cache
def fast_path_off() -> Meanwhile:
    """Return a setting that disables the fused path of torch's MultiheadAttention, which never calls the function."""
    from torch.backends import mha

    return Meanwhile(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False)
