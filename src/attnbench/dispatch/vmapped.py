"""What torch.func.vmap hides: an array looks like that of one example, and the kernel runs with all of them."""

from __future__ import annotations

import sys
from math import prod
from typing import Any


def examples(*arrays: Any) -> int:
    """How many examples vmap makes of the arrays at once, over all its levels; 1 outside of it."""
    sizes: dict[int, int] = {}
    for array in arrays:
        sizes |= _levels(array)
    return prod(sizes.values())


def varies(array: Any) -> bool:
    """Whether vmap gives each example its own."""
    return bool(_levels(array))


def examples_here() -> int:
    """How many examples the levels of vmap around this code have, whether an array varies in them or not."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 1
    functorch = torch._C._functorch
    vmaps = [one for one in functorch.get_interpreter_stack() or () if one.key() == functorch.TransformType.Vmap]
    return prod(functorch.CVmapInterpreterPtr(one).batchSize() for one in vmaps)


def _levels(array: Any) -> dict[int, int]:
    """Level of vmap -> its number of examples, of a tensor; levels of torch.func.grad lie between."""
    torch = sys.modules.get("torch")
    found: dict[int, int] = {}
    if torch is None or not isinstance(array, torch.Tensor):
        return found
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(array):
        inner = functorch.get_unwrapped(array)
        if functorch.is_batchedtensor(array):
            found[functorch.maybe_get_level(array)] = inner.shape[functorch.maybe_get_bdim(array)]
        array = inner
    return found
