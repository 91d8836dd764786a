"""Differentiable torch operations from a forward and a backward function. Imports torch: load it at the first use.

Only (q, k, v, out, lse) is kept between the two passes, so they may come from two libraries. A gradient is not
differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnbench.errors import Unsupported
from attnbench.frameworks.torch.internals import without_autocast_for
from attnbench.spec import Call, Layout, Partial

Function = Callable[..., Any]


class Operation:
    """A `forward(*inputs) -> outputs` with the gradient `backward(ctx, *grads)`; torch.func may transform it.

    `keep(ctx, inputs, outputs)` saves what the backward needs, from inputs and outputs alone.
    """

    def __init__(self, forward: Function, keep: Callable[..., None], backward: Function) -> None:
        self._plain = _plain(forward, keep, backward)
        self._transformed = _transformed(forward, keep, backward)

    def __call__(self, *inputs: Any) -> Any:
        # The form that torch.func asks for costs the host more at every call.
        transformed = torch._C._are_functorch_transforms_active()
        return (self._transformed if transformed else self._plain).apply(*inputs)


def _plain(forward: Function, keep: Callable[..., None], backward: Function) -> Any:
    class Plain(torch.autograd.Function):
        """Operation without support for torch.func, which is faster to call."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            outputs = forward(*inputs)
            keep(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return backward(ctx, *grads)

    return Plain


def _transformed(forward_: Function, keep: Callable[..., None], backward_: Function) -> Any:
    class Transformed(torch.autograd.Function):
        """Operation for torch.func; problems of a batch are computed one by one, since masks are made for one."""

        forward = staticmethod(forward_)
        setup_context = staticmethod(keep)
        backward = staticmethod(backward_)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            def problem(index: int) -> list[Any]:
                pairs = zip(inputs, in_dims, strict=True)
                return [x.select(axis, index) if isinstance(axis, int) else x for x, axis in pairs]

            results = [Transformed.apply(*problem(index)) for index in range(info.batch_size)]
            stacked = tuple([torch.stack(parts) for parts in zip(*results)])
            return stacked, (0,) * len(stacked)

    return Transformed


def once(function: Function, *arrays: Any) -> Any:
    """Return `function(*arrays)`, computed without autograd and without autocast: what every backward pass calls.

    The forward pass runs without autocast as well. Differentiating the result by any of the arrays raises.
    """
    with without_autocast_for(arrays):
        return _ONCE(function, *arrays) if torch.is_grad_enabled() else function(*arrays)


def refuse(ctx: Any, *grads: Any) -> NoReturn:
    """Raise in place of a second derivative."""
    raise Unsupported("second derivatives are not available from this implementation: ask for torch.eager.")


_ONCE = Operation(lambda function, *arrays: function(*arrays), lambda ctx, inputs, outputs: None, refuse)


FLOAT16_SAFE = 32768.0
"""Largest gradient of an LSE that is passed to a backward pass in float16 unscaled."""
Gradients = tuple[Any, Any, Any]


def _forward(pair: Partial, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return tuple(pair[0](q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    ctx.pair, ctx.layout, *arrays = inputs
    ctx.save_for_backward(*arrays, *outputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    return None, None, *once(partial(_gradients, ctx.pair[1], ctx.layout), *ctx.saved_tensors, dout, dlse)


def _gradients(backward: Function, layout: Layout, *arrays: Any) -> Gradients:
    *saved, dout, dlse = arrays
    out = saved[3]

    def of_out(dout: Tensor) -> Any:
        # Kernels expect the strides of the output; autograd may pass any view.
        return backward(*saved, dout if dout.stride() == out.stride() else torch.empty_like(out).copy_(dout))

    return of_both(of_out, lambda dlse: through_lse(backward, layout, *[*saved, dlse]), dout, dlse)


def of_both(
    of_out: Callable[[Tensor], Any], of_lse: Callable[[Tensor], Any], dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """Return (dq, dk, dv) of a loss in the output, in the LSE, or in both; None if it is in neither."""
    if dout is None:
        return (None, None, None) if dlse is None else of_lse(dlse)
    dq, dk, dv = of_out(dout)
    if dlse is None:
        return dq, dk, dv
    more_dq, more_dk, _ = of_lse(dlse)
    return dq + more_dq, dk + more_dk, dv


def through_lse(
    backward: Function, layout: Layout, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor,
    excess: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of the LSE by another backward pass, which gets `dlse / excess` if float16 needs that.

    That pass takes p * (<dout, v> - <dout, out>) as the logits' gradient, and p * dlse is wanted: so values are 0, and
    `out` has the product -dlse with `dout`, in two columns so that 16 bits lose little of it.
    """
    if out.dtype == torch.float16:
        excess = beyond_float16(dlse) if excess is None else excess
        dlse = dlse / excess
    rows = (dlse if layout == "bhsd" else dlse.transpose(1, 2)).unsqueeze(-1)
    lead = rows.to(out.dtype)
    carrier, ones = torch.zeros_like(out), torch.zeros_like(out)
    carrier[..., :1], ones[..., :2] = -lead, 1.0
    if out.shape[-1] > 1:
        carrier[..., 1:2] = (lead.to(rows.dtype) - rows).to(out.dtype)
    dq, dk, _ = backward(q, k, torch.zeros_like(v), carrier, lse, ones)
    if out.dtype == torch.float16:
        dq, dk = ((x.float() * excess).to(x.dtype) for x in (dq, dk))
    return dq, dk, torch.zeros_like(v)


def beyond_float16(dlse: Tensor) -> Tensor:
    """Return by which factor the largest value exceeds FLOAT16_SAFE, at least 1.

    A result that overflows in spite of the factor would overflow anyway.
    """
    if not dlse.numel():  # a rank of a ring may hold no tokens
        return dlse.new_ones(())
    finite = dlse.abs().masked_fill(~dlse.isfinite(), 0.0)
    return (finite.amax() / FLOAT16_SAFE).clamp(min=1.0)


_ATTENTION = Operation(_forward, _keep, _backward)


def differentiable(pair: Partial, layout: Layout = "bshd") -> Call:
    """Return `(q, k, v) -> (out, lse)` with the pair's gradient; that of the LSE costs a second backward pass."""
    return lambda q, k, v: _ATTENTION(pair, layout, q, k, v)


class _Turned:
    """A function of a pair on arrays with tokens and heads swapped, without autograd."""

    def __init__(self, function: Function) -> None:
        self.function = function

    @torch.no_grad()
    def __call__(self, *arrays: Tensor) -> Any:
        return tuple([_swapped(x) for x in self.function(*[_swapped(x) for x in arrays])])


def _swapped(x: Tensor) -> Tensor:
    """Return [b, s, h, d] as [b, h, s, d] and back; an LSE is [b, h, s] in either layout and stays."""
    return x.transpose(1, 2) if x.dim() == 4 else x


def turned(pair: Partial) -> Partial:
    """Return functions on bhsd as functions on bshd, or the reverse; turned twice they are the original ones.

    Only turned functions are without autograd by themselves.
    """
    forward, backward = (f.function if isinstance(f, _Turned) else _Turned(f) for f in pair)
    return forward, backward
