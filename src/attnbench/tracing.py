"""Marks for functions that torch.compile should not trace into, without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """Run it while torch.compile traces and keep the result, as torch.compiler.assume_constant_result does.

    Its arguments must be plain values, which become guards of the compiled graph.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def outside_graphs(function: Function) -> Function:
    """Let a graph of torch.compile end before a call of the function and begin again after, since its work depends on
    data."""

    @wraps(function)
    def run(*args: Any, **words: Any) -> Any:
        import torch

        called: Any = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return called(*args, **words)

    return cast(Function, run)


def being_traced() -> bool:
    """Return whether torch.compile is tracing in this thread."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor has a shape and no numbers, as in torch.export and under FakeTensorMode."""
    known = sys.modules.get("torch._subclasses.fake_tensor")
    return known is not None and known.is_fake(tensor)
