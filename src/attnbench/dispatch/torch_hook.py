"""`torch.nn.functional.scaled_dot_product_attention` as torch has it, and the hook in front of it."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from attnbench.dispatch.hooks import Hook, Meanwhile


class _Depth(threading.local):
    """How many implementations of ours the thread is inside of."""

    depth = 0


_INSIDE = _Depth()


class OwnRun:
    """`with OWN_RUN: ...` around what an implementation runs: what it calls itself is never redirected to another."""

    def __enter__(self) -> None:
        _INSIDE.depth += 1

    def __exit__(self, *error: object) -> None:
        _INSIDE.depth -= 1


OWN_RUN = OwnRun()


def in_own_run() -> bool:
    """Return whether the calling thread is inside an implementation of ours."""
    return _INSIDE.depth > 0


def torch_sdpa(*args: Any, **kwargs: Any) -> Any:
    """Torch's own function, also while it is replaced."""
    import torch

    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if mask is not None and type(mask).__name__ == "CausalBias":
        # This bias asks whether the function is the one in torch.nn.functional, which may be the replacement.
        now = torch.nn.functional.scaled_dot_product_attention
        return type(mask).__torch_function__(now, (type(mask),), args, kwargs)
    return torch._C._nn.scaled_dot_product_attention(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def sdpa_hook() -> Hook:
    """The one hook; our own implementations and torch's internals keep torch's function."""
    import torch

    function = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
    return Hook(function, "torch.nn.functional", spare=("torch.", "attnbench."), original=torch_sdpa)


@cache
def fast_path_off() -> Meanwhile:
    """Torch's MultiheadAttention and TransformerEncoderLayer without the fused path that never calls the function."""
    from torch.backends import mha

    return Meanwhile(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False)
