"""Passes of a mask of growing blocks in JAX: the keys that every query sees in one call, the few other pairs beside it.

All of pi0's queries see the 816 keys of its prefix; what is left is 51 queries over 51 keys. So the kernel is handed
the queries, the output and its gradient as they are, where a call for every block would copy its rows of each. The two
parts are joined by their LSE, and each goes backward with the output and the LSE of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from attnbench import masks
from attnbench.impls.partial import jax_blocks
from attnbench.impls.partial.jax_turns import by_turns
from attnbench.masks.pieces import Piece
from attnbench.spec import Array, Implementation, Partial, Workload

MOST_PAIRS = 128 * 128
"""Beside the call, of one head: their scores are stored."""


class Corner(NamedTuple):
    """What is left beside the common keys: the queries from `rows` on over the keys from `keys` on."""

    rows: int
    keys: int
    seen: Any
    """[..., queries, keys] of the corner, booleans; an array of JAX where padding is known only inside jit."""

    @property
    def last(self) -> int:
        """The end of its keys."""
        return self.keys + self.seen.shape[-1]


def corner_of(cut: Sequence[Piece]) -> Corner | None:
    """None where there is nothing beside, too much, or no key that every query sees."""
    if len(cut) < 2 or any(piece.first or piece.mask.kinds != ("full",) for piece in cut):
        return None
    rows, keys, last = cut[0].stop, cut[0].last, max(piece.last for piece in cut)
    if any(piece.last < keys for piece in cut) or (cut[-1].stop - rows) * (last - keys) > MOST_PAIRS:
        return None
    ends = np.concatenate([np.full(piece.stop - piece.start, piece.last) for piece in cut[1:]])
    return Corner(rows, keys, np.arange(keys, last) < ends[:, None])


def common_passes(
    inner: Implementation, workload: Workload, cut: Sequence[Piece], sequences: int = 0
) -> Partial | None:
    """Of the whole, [b, s, h, d]; None for other masks, or where the kernel does not show its passes.

    So many `sequences` at a time (0: all) where the kernel needs more than inputs and outputs: in the backward pass.
    """
    corner = corner_of(cut)
    if corner is None:
        return None
    common = replace(workload, kv_len=corner.keys, mask=masks.full())
    forward_all, _ = inner.passes(common, {})
    forward_turn, backward_turn = inner.passes(replace(common, batch=sequences or workload.batch), {})
    if forward_all is None or forward_turn is None or backward_turn is None:
        return None
    backward_all = by_turns(backward_turn, sequences)
    if inner.materialises_scores:
        forward_all = by_turns(forward_turn, sequences)
    rule = jax_blocks.Rule(workload.softmax_scale, workload.softcap)

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return forward_joined(forward_all, corner, rule, q, k, v)

    def backward(*arrays: Array) -> tuple[Array, Array, Array]:
        return backward_joined(backward_all, corner, rule, *arrays)

    return forward, backward


def forward_joined(
    common: Callable[..., tuple[Array, Array]], corner: Corner, rule: jax_blocks.Rule, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """(out, lse) of the whole; `common` computes all queries over the common keys."""
    first, keys, last = corner.rows, slice(None, corner.keys), corner.last
    out, lse = common(q, k[:, keys], v[:, keys])
    own = slice(corner.keys, last)
    part = jax_blocks.forward(q[:, first:], k[:, own], v[:, own], corner.seen, rule)
    whole, whole_lse = jax_blocks.merge(out[:, first:].astype(part[0].dtype), lse[..., first:], *part)
    return out.at[:, first:].set(whole.astype(out.dtype)), lse.at[..., first:].set(whole_lse)


def backward_joined(
    common: Callable[..., tuple[Array, Array, Array]],
    corner: Corner,
    rule: jax_blocks.Rule,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of the whole from its output and LSE; `common` is the backward pass over the common keys."""
    import jax.numpy as jnp

    first, keys, last = corner.rows, slice(None, corner.keys), corner.last
    dq, *grads = common(q, k[:, keys], v[:, keys], out, lse, dout)
    own, whole = slice(corner.keys, last), (out[:, first:], lse[..., first:], dout[:, first:])
    more, *rest = jax_blocks.backward(q[:, first:], k[:, own], v[:, own], whole, corner.seen, rule)
    dq = dq.at[:, first:].set((dq[:, first:].astype(more.dtype) + more).astype(dq.dtype))
    unseen = (jnp.zeros_like(x[:, last:]) for x in (k, v))
    dk, dv = (jnp.concatenate([a, b.astype(a.dtype), c], 1) for a, b, c in zip(grads, rest, unseen))
    return dq, dk, dv
