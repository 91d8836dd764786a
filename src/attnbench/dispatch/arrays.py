"""Live arrays -> framework, device, pass, and views of them in another layout."""

from __future__ import annotations

from typing import Any

from attnbench import frameworks
from attnbench.errors import InvalidWorkload
from attnbench.frameworks.jax.plain import kind_of_device
from attnbench.spec import Array, Pass


def framework_of(*arrays: Array) -> str:
    """The one framework the arrays belong to."""
    names = {frameworks.of(array) for array in arrays}
    if len(names) > 1:
        raise InvalidWorkload(f"q, k and v must come from one framework, not {' and '.join(sorted(names))}.")
    return names.pop()


def device_of(array: Array, framework: str) -> str:
    """Our name of the device an array lies on (of a JAX array that is traced or only a shape: the default device)."""
    if framework == "torch":
        kind = array.device.type
        found = frameworks.get("torch").devices()
        return "rocm" if kind == "cuda" and "rocm" in found else kind
    if framework == "numpy":
        return "cpu"
    return kind_of_device(array)


def pass_of(framework: str, *arrays: Array) -> Pass:
    """Whether gradients may be asked of a call: torch says so itself, JAX may ask them of any that is traced."""
    if framework == "torch":
        import torch

        return "train" if torch.is_grad_enabled() and any(array.requires_grad for array in arrays) else "forward"
    if framework == "jax":
        from jax.core import Tracer

        return "train" if any(isinstance(array, Tracer) for array in arrays) else "forward"
    return "forward"


def to_layout(array: Array, source: str, target: str, heads: int | None = None) -> Array:
    """A view in another layout, differentiable and traceable; `heads` when the source is packed."""
    if source == "packed":
        array = array.reshape(*array.shape[:2], heads, -1)
        source = "bshd"
    if target == "packed":
        array = to_layout(array, source, "bshd")
        return array.reshape(*array.shape[:2], -1)
    return array if source == target else _swap(array)


def _swap(array: Array) -> Any:
    return array.transpose(1, 2) if hasattr(array, "requires_grad") else array.transpose(0, 2, 1, 3)
