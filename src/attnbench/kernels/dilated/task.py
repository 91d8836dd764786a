"""What is asked of dilated attention besides its arrays: the problem, and how it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attnbench.kernels.dilated.pieces import Problem
from attnbench.spec import Array

Forward = tuple[Array, Array, tuple[Array, ...]]
"""Output [b, s, h, d], LSE [b, s, h] in float32 (float64 for float64 inputs), and what the backward wants besides."""


class Task(NamedTuple):
    """One call; hashable."""

    problem: Problem
    scale: float
    detached: bool = False
    """Mixing weights count as constants in the backward, as in torchscale."""
    kernel: str = "auto"
    """Name of the implementation whose partial form computes the pieces."""
    merge: str = "auto"
    """How partial results become one: "triton" (one fused kernel), "eager", or "auto"."""
    diagonal: bool = True
    """Whether heads of different offsets may share a call."""


class Engine(NamedTuple):
    """A way to compute a task on torch arrays, without autograd."""

    forward: Callable[..., Forward]
    backward: Callable[..., tuple[Any, Any, Any]]
