"""NumPy, torch and JAX behind one interface. The only package that knows a framework as such."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from attnbench.errors import UnknownName, UsageError
from attnbench.frameworks.base import OUTPUTS, Clock, Framework, Inputs, Peak, Program, Programs, Samples
from attnbench.spec import Environment

__all__ = [
    "NAMES", "OUTPUTS", "Clock", "Framework", "Inputs", "Peak", "Program", "Programs", "Samples", "environment_of",
    "get", "installed", "of",
]  # fmt: skip
NAMES = ("numpy", "torch", "jax")


def installed(name: str) -> bool:
    """Return whether a library can be imported, without importing it."""
    return find_spec(name) is not None


@cache
def get(name: str) -> Framework:
    """Return the adapter of a framework; the library itself is imported on first use."""
    if name not in NAMES:
        raise UnknownName("framework", name, NAMES, "attnbench doctor")
    if not installed(name):
        raise UsageError(f"{name} is not installed: pip install 'attnbench[{name}]'.")
    module = "numpy" if name == "numpy" else f"{name}.framework"
    return import_module(f"attnbench.frameworks.{module}").FRAMEWORK


@lru_cache(maxsize=32)
def environment_of(framework: str, device: str) -> Environment:
    """Return basic facts about a device of a framework, read once."""
    return get(framework).environment(device)


def of(value: Any) -> str:
    """Return the name of the framework that an array belongs to, by its type alone."""
    for kind in type(value).__mro__:
        root = kind.__module__.partition(".")[0]
        name = {"jaxlib": "jax"}.get(root, root)
        if name in NAMES:
            return name
    raise UsageError(f"q, k and v must be torch, jax or numpy arrays, not {type(value).__name__}.")
