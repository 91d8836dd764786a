"""Operations with a gradient of their own that is not differentiated again. Imports torch: load it at the first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from attnbench.errors import Unsupported
from attnbench.frameworks.torch.internals import without_autocast_for

Function = Callable[..., Any]


class Operation:
    """A `forward(*inputs) -> outputs` whose gradient is `backward(ctx, *grads)`; torch.func may transform it.

    `keep(ctx, inputs, outputs)` saves what the backward wants, of inputs and outputs alone.
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
        """Both halves of a forward pass in one."""

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
        """The same for torch.func; a batch of problems is computed one by one, as masks are made for one."""

        forward = staticmethod(forward_)
        setup_context = staticmethod(keep)
        backward = staticmethod(backward_)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            return _one_by_one(Transformed.apply, info.batch_size, in_dims, inputs)

    return Transformed


def _one_by_one(function: Function, count: int, axes: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """Each of a batch of problems, and their results stacked."""

    def one(index: int) -> Any:
        return function(
            *[x.select(axis, index) if isinstance(axis, int) else x for x, axis in zip(inputs, axes, strict=True)]
        )

    found = tuple([torch.stack(each) for each in zip(*[one(index) for index in range(count)])])
    return found, (0,) * len(found)


def once(function: Function, *arrays: Any) -> Any:
    """Return `function(*arrays)`, computed without autograd and without autocast: what every backward pass calls.

    The forward pass ran without autocast as well. Differentiating the result by any of the arrays raises.
    """
    with without_autocast_for(arrays):
        return _ONCE(function, *arrays) if torch.is_grad_enabled() else function(*arrays)


def _computed(function: Function, *arrays: Any) -> Any:
    return function(*arrays)


def _nothing_kept(ctx: Any, inputs: Any, outputs: Any) -> None:
    return None


def refuse(ctx: Any, *grads: Any) -> NoReturn:
    """In place of a gradient's own gradient."""
    raise Unsupported("second derivatives are not available from this implementation: ask for torch.eager.")


_ONCE = Operation(_computed, _nothing_kept, refuse)
