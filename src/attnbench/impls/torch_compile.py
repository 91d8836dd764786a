"""torch.compile without its silent fall-backs; `torch.compiled` and `torch.flex` compile through here.

Dynamo counts recompilations per code object and, past the limit, runs the function eagerly with a line in the log. So
each build compiles a code object of its own, and a limit that is hit all the same is an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from types import FunctionType
from typing import Any

from attnbench.impls.conditions import needs_package
from attnbench.spec import Array, Call, Environment

COMPILED_GRAPH = r"Torch-Compiled Region|CompiledFxGraph|triton_|cpp_fused"
"""Seen in a profile only when compiled code ran."""


class CompiledCall:
    """A call that compiles at its first use: the framework times that apart."""

    compiles = True

    def __init__(self, call: Call, prepare: Callable[[Any], object] | None = None) -> None:
        self._call = call
        self._prepare = prepare

    def prepare(self, device: Any) -> None:
        """Make what the call needs on a device now: inside another compiled function it would be too late."""
        if self._prepare is not None:
            self._prepare(device)

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        return self._call(q, k, v)


def compile_fresh(function: FunctionType) -> Callable[..., Any]:
    """Compile a copy of the function for fixed shapes, as one graph."""
    import torch
    import torch._dynamo

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.suppress_errors = False
    own_code = function.__code__.replace()
    copy = FunctionType(own_code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(copy, dynamic=False, fullgraph=True)


def needs_compiler(environment: Environment) -> str | None:
    """A C++ compiler on a CPU, Triton on a GPU."""
    if environment.device != "cpu":
        return None if environment.device == "mps" else needs_package("triton", "pip install triton")
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if any(shutil.which(name) for name in wanted):
        return None
    return f"needs a C++ compiler and found no {' or '.join(wanted)}: install one or set CXX"
