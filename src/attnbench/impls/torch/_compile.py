"""torch.compile without its silent fall-backs; `torch.compiled` and `torch.flex` compile through here.

Dynamo counts recompilations per code object and, past the limit, runs a function eagerly with a line in the log. So
each build compiles a code object of its own as one whole graph, for which Dynamo has no fall-back: reaching the limit
is an error. Dynamo's settings, which belong to the whole process, stay as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from types import FunctionType
from typing import Any

from attnbench.errors import Unsupported
from attnbench.impls.conditions import needs_at_least, needs_package
from attnbench.spec import Array, Call, Environment

COMPILED_GRAPH = r"Torch-Compiled Region|CompiledFxGraph|triton_|cpp_fused"
"""Pattern that a profile has only if compiled code ran."""


TRITON_SINCE = (7, 0)
"""Least compute capability that Triton compiles for."""


class CompiledCall:
    """A call that compiles at its first use, which the framework times apart."""

    compiles = True

    def __init__(self, call: Call, prepare: Callable[[Any], object] | None = None) -> None:
        self._call = call
        self._prepare = prepare

    def prepare(self, device: Any) -> None:
        """Make what the call needs on a device now, because inside another compiled function it would be too late."""
        if self._prepare is not None:
            self._prepare(device)

    def __call__(self, *arrays: Array) -> Any:
        return self._call(*arrays)


def compile_fresh(function: FunctionType) -> Callable[..., Any]:
    """Return a compiled copy of the function, for fixed shapes and as one graph."""
    import torch
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch.compiler import is_dynamo_compiling

    own_code = function.__code__.replace()
    copy = FunctionType(own_code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    compiled = torch.compile(copy, dynamic=False, fullgraph=True)

    def run(*arrays: Any) -> Any:
        if is_dynamo_compiling():
            return compiled(*arrays)
        try:
            return compiled(*arrays)
        except FailOnRecompileLimitHit as error:
            raise Unsupported(
                "this call got more combinations of strides, shapes and gradients than torch.compile compiles for one "
                "function: raise torch._dynamo.config.recompile_limit, or make the arrays contiguous."
            ) from error

    return run


def needs_compiler(environment: Environment) -> str | None:
    """Refuse a CPU without a C++ compiler, and a GPU without Triton."""
    if environment.device != "cpu":
        missing = None if environment.device == "mps" else needs_package("triton", "pip install triton")
        return missing or needs_at_least(environment, TRITON_SINCE)
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if any(shutil.which(name) for name in wanted):
        return None
    return f"needs a C++ compiler, but found no {' or '.join(wanted)}: install one or set CXX"
