"""What torch.compile must be told of functions that it should not look into, without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """Run it while torch.compile traces and keep the result, as torch.compiler.assume_constant_result does.

    Its arguments must be plain values, which become guards of the compiled graph.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def being_traced() -> bool:
    """Whether torch.compile is tracing in this thread."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None
