"""jax.cudnn-split and jax.xla-split: a block_causal, documents or prefix mask as a few calls without a mask array.

pi0's training mask (816 prefix tokens, a state token, 50 actions) is three calls: the queries of a block see exactly
the keys up to its end. cuDNN then needs no bias, whose array would cover every batch row and head. A causal piece that
does not start at its first key (the text after pi0-FAST's prefix) would need an array in
`jax.nn.dot_product_attention`, so it is refused.

If the kernel offers its passes, the keys that all queries see are one call (`common_passes`) that copies no rows, and
the few other pairs are computed beside it; both parts are joined by their LSE, and both backward passes use the output
and the LSE of the whole. `[sequences=8]` computes eight sequences of the batch at a time, which bounds the memory
beside inputs, output and gradients to that of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.impls._splitting import Split, cut_of, part_of, sliced
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._masks import mask_arguments
from attnbench.impls.jax.nn import CUDNN, XLA
from attnbench.impls.partial.jax_passes import Rule, block_backward, block_forward, differentiable, merge_parts
from attnbench.masks.cuts import Piece
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Workload


class JaxSplit(Split):
    """A mask split into calls of `jax.nn` without an array, for the whole batch (`sequences=0`) or some sequences at a
    time."""

    tunables = {"sequences": 0}

    def __init__(self, inner: Implementation, untested: tuple[str, ...], sequences: int = 0) -> None:
        super().__init__(inner)
        self.untested, self._sequences = untested, sequences
        self.description = f"Masks of a few blocks as calls of {inner.name} without a mask array."

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return the whole batch at once, and an eighth and a quarter of a large batch at a time."""
        parts = [workload.batch // share for share in (8, 4) if workload.batch >= 2 * share]
        able = [size for size in parts if self._cannot_part(workload, size) is None]
        return ({}, *({"sequences": size} for size in able))

    def configured(self, config: Config) -> JaxSplit:
        sequences = config.get("sequences", self._sequences)
        if not isinstance(sequences, int) or sequences < 0:
            raise UsageError(f"{self.name} takes a number of sequences at a time (0: all), not {sequences!r}.")
        return JaxSplit(self.inner, self.untested, sequences) if sequences != self._sequences else self

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(super().supports(workload, environment), self._cannot_part(workload, self._sequences))

    def _cannot_part(self, workload: Workload, size: int) -> str | None:
        if size and workload.batch % size:
            return f"cannot take a batch of {workload.batch} by {size} sequences at a time: use a divisor"
        if 0 < size < workload.batch and workload.visible_mask.per_batch:
            return f"takes {size} sequences at a time only if all have the same mask"
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        """Return a call that uses the kernel's own passes if they are available; else every turn keeps copies."""
        size = self.configured(config)._sequences
        common = common_passes(self.inner, workload, cut_of(workload), size)
        if common is not None:
            return differentiable(common, with_lse=False)
        turn = replace(workload, batch=size or workload.batch)
        passes = split_passes(self.inner, turn, cut_of(turn)) if size and workload.needs_gradients else None
        if passes is None:
            return by_turns(super().build(turn, {}), size)
        forward, backward = passes
        return differentiable((by_turns(forward, size), by_turns(backward, size)), with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Return a call for all sequences at once; None for some at a time."""
        return None if self.configured(config)._sequences else super().build_lse(workload, {})

    def needs_array(self, part: Workload, environment: Environment) -> bool:
        return mask_arguments(part).needs_array

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        import jax.numpy as jnp

        return jnp.concatenate(parts, axis=axis)


CUDNN_SPLIT = JaxSplit(CUDNN, ())
XLA_SPLIT = JaxSplit(XLA, ("cuda", "rocm", "tpu"))


MOST_PAIRS = 128 * 128
"""Largest number of pairs of a head beside the call, because their scores are stored."""


class Corner(NamedTuple):
    """Pairs beside the common keys: queries from `rows` on over keys from `keys` on."""

    rows: int
    keys: int
    seen: Any
    """Booleans [..., queries, keys] of the corner; an array of JAX if padding is known only inside jit."""

    @property
    def last(self) -> int:
        """End of the corner's keys."""
        return self.keys + self.seen.shape[-1]


def corner_of(cut: Sequence[Piece]) -> Corner | None:
    """Return the pairs beside the common keys; None if there are none, too many, or no keys that every query sees."""
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
    """Return passes [b, s, h, d] of a whole mask with common keys; None for other masks or if the kernel hides its
    passes.

    Computes `sequences` at a time (0: all) in passes that need more memory than inputs and outputs: the backward pass.
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
    rule = Rule(workload.softmax_scale, workload.softcap)

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return forward_joined(forward_all, corner, rule, q, k, v)

    def backward(*arrays: Array) -> tuple[Array, Array, Array]:
        return backward_joined(backward_all, corner, rule, *arrays)

    return forward, backward


def forward_joined(
    common: Callable[..., tuple[Array, Array]], corner: Corner, rule: Rule, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """Return (out, lse) of the whole; `common` computes all queries over the common keys."""
    first, keys, last = corner.rows, slice(None, corner.keys), corner.last
    out, lse = common(q, k[:, keys], v[:, keys])
    own = slice(corner.keys, last)
    part = block_forward(q[:, first:], k[:, own], v[:, own], corner.seen, rule)
    whole, whole_lse = merge_parts(out[:, first:].astype(part[0].dtype), lse[..., first:], *part)
    return out.at[:, first:].set(whole.astype(out.dtype)), lse.at[..., first:].set(whole_lse)


def backward_joined(
    common: Callable[..., tuple[Array, Array, Array]],
    corner: Corner,
    rule: Rule,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) of the whole from its output and LSE; `common` is the backward pass over the common keys."""
    import jax.numpy as jnp

    first, keys, last = corner.rows, slice(None, corner.keys), corner.last
    dq, *grads = common(q, k[:, keys], v[:, keys], out, lse, dout)
    own, whole = slice(corner.keys, last), (out[:, first:], lse[..., first:], dout[:, first:])
    more, *rest = block_backward(q[:, first:], k[:, own], v[:, own], whole, corner.seen, rule)
    dq = dq.at[:, first:].set((dq[:, first:].astype(more.dtype) + more).astype(dq.dtype))
    unseen = (jnp.zeros_like(x[:, last:]) for x in (k, v))
    dk, dv = (jnp.concatenate([a, b.astype(a.dtype), c], 1) for a, b, c in zip(grads, rest, unseen))
    return dq, dk, dv


TOKENS, LSE_TOKENS = 1, 2


def split_passes(inner: Implementation, workload: Workload, cut: Sequence[Piece]) -> Partial | None:
    """Return passes [b, s, h, d] of the whole, joined from those of the pieces; None if the kernel hides a pass of a
    piece.

    The backward pass keeps q, k, v, output and LSE of the whole, not copies for every piece.
    """
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
    """Return `call` on `sequences` of the batch at a time, one turn after another; 0: on all at once."""

    def turns(*arrays: Array) -> Any:
        import jax

        stacked = [x.reshape(-1, sequences, *x.shape[1:]) for x in arrays]
        found = jax.lax.map(lambda one: call(*one), stacked)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    return turns if sequences else call
