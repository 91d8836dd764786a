"""What is around the attention of a step, in numbers (not bytes), so that the step's cost can be told."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from attnbench.spec import Workload


class Around(Struct, frozen=True, kw_only=True):
    """One step on one workload."""

    weights: int
    """Numbers that lie in memory as weights."""
    products: int
    """Multiply-adds with them in one forward pass."""
    inputs: int
    """Numbers that come in beside the weights."""
    outputs: int
    """Numbers that a forward pass returns."""
    attention: tuple[tuple[int, Workload], ...]
    """How often which attention is computed."""
    reads: int = 0
    """Weights that a forward pass must read, each as often as it is; 0: each once."""
    input_gradients: bool = True
    """Whether a training step returns gradients of the inputs too, beside those of the weights."""


class Surroundings(Struct, frozen=True):
    """A step in words, and what it consists of."""

    description: str
    around: Callable[[Workload], Around]


def same_tokens(w: Workload, width: int, weights: int, layers: int = 1) -> Around:
    """Every token is multiplied with every weight once; vectors of one width come in and go out."""
    tokens = w.batch * w.q_len
    return Around(
        weights=weights,
        products=tokens * weights,
        inputs=tokens * width,
        outputs=tokens * width,
        attention=((layers, w),),
    )
