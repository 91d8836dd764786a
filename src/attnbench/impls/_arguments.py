"""What arguments that several functions and modules share may be: each check raises one sentence that says it."""

from __future__ import annotations

import math
from typing import Any

from attnbench.errors import UsageError


def number(value: Any) -> bool:
    """True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def check_scale(scale: Any) -> None:
    """Refuse what logits cannot be multiplied by."""
    if scale is not None and not (number(scale) and math.isfinite(scale)):
        raise UsageError(f"scale is a finite number, or None for head_dim ** -0.5, not {scale!r}.")


def check_causal(causal: Any) -> None:
    """Refuse what is only taken for true."""
    if not isinstance(causal, bool):
        raise UsageError(f"causal is True or False, not {causal!r}.")


def check_mix_grad(mix_grad: Any) -> None:
    """Refuse other ways to differentiate the mixing of dilated branches."""
    if mix_grad not in ("full", "detached"):
        raise UsageError(f'mix_grad is "full" or "detached" (torchscale), not "{mix_grad}".')


def check_tensors(who: str, *arrays: Any) -> None:
    """Refuse arrays of other libraries."""
    import torch

    for x in arrays:
        if not isinstance(x, torch.Tensor):
            raise UsageError(f"{who} takes torch tensors, not {kind_of(x)}: torch.as_tensor(x) makes one.")


def kind_of(x: Any) -> str:
    """numpy.ndarray, jax.Array, ..., None."""
    if x is None:
        return "None"
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
