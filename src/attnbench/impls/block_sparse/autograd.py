"""A pair of functions on parts of a whole, made into one differentiable call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Pair = tuple[Callable[..., Any], Callable[..., Any]]


class _Attention(torch.autograd.Function):
    """q, k, v -> out, lse; nothing but (q, k, v, out, lse) is kept for the backward pass, and lse has no gradient."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = pair[0](q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pair = pair
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.pair[1](*ctx.saved_tensors, dout)


def differentiable(pair: Pair) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, Any]]:
    """`(q, k, v) -> (out, lse)` whose gradient is the pair's backward."""
    return lambda q, k, v: _Attention.apply(pair, q, k, v)  # pyright: ignore[reportReturnType]
