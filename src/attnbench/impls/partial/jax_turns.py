"""Passes of a split mask in JAX, all sequences at once or so many at a time.

The pieces' own passes are joined before they are made differentiable: what is kept for the backward pass is q, k, v,
the output and the LSE of the whole, and not every piece's copies of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnbench.impls.partial.splitting import part_of, sliced
from attnbench.masks.pieces import Piece
from attnbench.spec import Array, Implementation, Partial, Workload

TOKENS, LSE_TOKENS = 1, 2


def split_passes(inner: Implementation, workload: Workload, cut: Sequence[Piece]) -> Partial | None:
    """Of the whole, [b, s, h, d]; None where the kernel does not show both of its passes for every piece."""
    found = [inner.passes(part_of(workload, piece), {}) for piece in cut]
    pairs = [(forward, backward) for forward, backward in found if forward is not None and backward is not None]
    if len(pairs) < len(cut):
        return None

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        import jax.numpy as jnp

        parts = [one(*sliced(q, k, v, piece, TOKENS)) for (one, _), piece in zip(pairs, cut)]
        out, lse = zip(*parts)
        return jnp.concatenate(out, TOKENS), jnp.concatenate(lse, LSE_TOKENS)

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        import jax.numpy as jnp

        dqs, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        for (_, one), piece in zip(pairs, cut):
            rows, keys = slice(piece.start, piece.stop), slice(piece.first, piece.last)
            mine = *sliced(q, k, v, piece, TOKENS), out[:, rows], lse[..., rows], dout[:, rows]
            dq, more_dk, more_dv = one(*mine)
            dqs.append(dq)
            dk, dv = dk.at[:, keys].add(more_dk), dv.at[:, keys].add(more_dv)
        return jnp.concatenate(dqs, TOKENS), dk.astype(k.dtype), dv.astype(v.dtype)

    return forward, backward


def by_turns(call: Callable[..., Any], sequences: int) -> Callable[..., Any]:
    """`call` on so many sequences of the batch at a time, one after the other; 0: on all at once."""

    def turns(*arrays: Array) -> Any:
        import jax

        stacked = [x.reshape(-1, sequences, *x.shape[1:]) for x in arrays]
        found = jax.lax.map(lambda one: call(*one), stacked)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    return turns if sequences else call
