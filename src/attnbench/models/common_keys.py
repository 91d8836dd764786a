"""The flash path of pi0's training mask: the keys that every query sees in one call, the suffix's own pairs beside it.

As `attnbench.impls.partial.jax_common_keys` does it for masks that are known, with padding that exists only inside jit:
the kernel is handed all queries as they are and key lengths, and copies no rows. A batch row without a valid key among
the common ones has no part in that call; its other queries may still see keys of the suffix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from attnbench.impls.partial import jax_blocks
from attnbench.impls.partial.jax_common_keys import MOST_PAIRS, Corner, backward_joined, forward_joined
from attnbench.models.masks import TokenMask
from attnbench.spec import Partial


def has_common_keys(mask: TokenMask) -> bool:
    """Whether the queries after the first run are few, see the keys of the first, and those stand in front."""
    if mask.runs is None or len(mask.runs) < 2:
        return False
    (queries, keys), *others = mask.runs
    few = (mask.q_len - queries) * (mask.kv_len - keys) <= MOST_PAIRS
    in_front = mask.valid is None or mask.packed >= keys
    return keys > 0 and few and in_front and all(more >= keys for _, more in others)


def attend(q: Array, k: Array, v: Array, mask: TokenMask, scale: float, kernel: Partial) -> Array:
    """[B, T, N, H]; `kernel` is (forward, backward); where keys may be invalid, their last argument is key lengths [B],
    each at least 1."""
    assert mask.runs is not None
    first, keys = mask.runs[0]
    rule = jax_blocks.Rule(scale, None)
    lengths = () if mask.valid is None else (mask.valid_keys(keys),)
    seen = mask.rows(first, mask.q_len, mask.kv_len)[:, :, None, :, keys:]

    @jax.custom_vjp
    def run(q: Array, k: Array, v: Array, seen: Array, *lengths: Array) -> Array:
        return forward(q, k, v, seen, *lengths)[0]

    def forward(q: Array, k: Array, v: Array, seen: Array, *lengths: Array) -> tuple[Array, Any]:
        def common(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = kernel[0](q, k, v, *(jnp.maximum(one, 1) for one in lengths))
            return out, _where_empty(lengths, -jnp.inf, lse)

        out, lse = forward_joined(common, Corner(first, keys, seen), rule, q, k, v)
        return out, (q, k, v, seen, lengths, out, lse)

    def backward(kept: Any, dout: Array) -> tuple[Any, ...]:
        q, k, v, seen, lengths, out, lse = kept

        def common(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            at_least_one = (jnp.maximum(one, 1) for one in lengths)
            return kernel[1](q, k, v, out, _where_empty(lengths, jnp.inf, lse), dout, *at_least_one)

        gradients = backward_joined(common, Corner(first, keys, seen), rule, q, k, v, out, lse, dout)
        return *gradients, None, *(None for _ in lengths)

    run.defvjp(forward, backward)
    return run(q, k, v, seen, *lengths)


def _where_empty(lengths: tuple[Array, ...], value: float, lse: Array) -> Array:
    """The LSE with another value in batch rows that have none of the common keys."""
    for length in lengths:
        lse = jnp.where(length[:, None, None] == 0, value, lse)
    return lse
