"""An LSE through which no gradient flows may be read; a loss that is made of it would silently learn nothing."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from attnbench.errors import Unsupported
from attnbench.spec import Array, Call


def guarded(call: Call, name: str, framework: str) -> Call:
    """The same call; asking the gradient of its LSE raises Unsupported."""
    mark = {"torch": _torch, "jax": _jax}[framework]()

    def run(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse = call(q, k, v)
        return out, mark(q, k, lse, name)

    return run


def _refuse(name: str) -> NoReturn:
    raise Unsupported(
        f"no gradient flows through the LSE of {name}: cut it off (detach, stop_gradient) where it is only read, or "
        "ask for torch.eager or torch.pair, jax.einsum or jax.pair, whose LSE has one."
    )


@cache
def _torch() -> Any:
    import torch

    class Unlearnable(torch.autograd.Function):
        """The LSE as it is, a function of q and k that has no derivative."""

        generate_vmap_rule = True

        @staticmethod
        def forward(q: Any, k: Any, lse: Any, name: str) -> Any:
            return lse.detach().clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.name = inputs[3]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            _refuse(ctx.name)

    return Unlearnable.apply


@cache
def _jax() -> Any:
    import jax

    def unlearnable(q: Any, k: Any, lse: Any, name: str) -> Any:
        return lse

    def kept(q: Any, k: Any, lse: Any, name: str) -> Any:
        return lse, None

    mark = jax.custom_vjp(unlearnable, nondiff_argnums=(3,))
    mark.defvjp(kept, lambda name, saved, grad: _refuse(name))
    return mark
