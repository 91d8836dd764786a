"""Forward and backward passes apart in JAX: operator by operator, cuDNN's, their differentiable composition, and
passes of a mask with common keys.

A backward pass takes `out` and `lse` of the whole, so that the gradients of blocks add up to the gradients of the
whole. Unlike in `jax.nn.dot_product_attention`, the LSE is float32 (or float64) and takes part in the backward pass.

cuDNN's passes are not public: `jax.nn.dot_product_attention` rounds the LSE to the inputs' dtype and hides the backward
pass. Both come from JAX's private module, and only if its backward rule has the signature that was tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from attnbench import masks
from attnbench.errors import Unsupported
from attnbench.frameworks.jax.plain import (
    capped_logits,
    grouped_heads,
    in_usual_promotion,
    product_precision,
    visible,
)
from attnbench.impls.jax._libraries import mask_arguments
from attnbench.masks.cuts import MaskPiece
from attnbench.spec import Array, Call, Implementation, Partial, Workload


class Rule(NamedTuple):
    """Scale and soft cap of the logits, before the mask."""

    scale: float
    softcap: float | None


def no_parts(q: Array, v: Array) -> tuple[Array, Array]:
    """Return (out, lse) of no blocks: zeros [b, t, h, dv] and -inf [b, h, t], in float32 or float64."""
    import jax.numpy as jnp

    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, tokens, heads, _ = q.shape
    return jnp.zeros((batch, tokens, heads, v.shape[-1]), wide), jnp.full((batch, heads, tokens), -jnp.inf, wide)


def merge_parts(out: Array, lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """Return (out, lse) of two partial results together."""
    import jax.numpy as jnp

    both = jnp.logaddexp(lse, part_lse)
    base = jnp.where(both == -jnp.inf, 0.0, both)
    kept, added = (jnp.exp(x - base).transpose(0, 2, 1)[..., None] for x in (lse, part_lse))
    return out * kept + part * added, both


def block_forward(q: Array, k: Array, v: Array, seen: Array | None, rule: Rule) -> tuple[Array, Array]:
    """Return (out, lse) in float32 or float64; `seen` [t, s] are the visible pairs, None for all."""
    import jax.numpy as jnp

    logits = _logits(q, k, seen, rule)
    top = logits.max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1)
    out = _einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v)
    per_row = jnp.where(total == 0, 1.0, total).transpose(0, 3, 1, 2)[..., None]
    lse = (top[..., 0] + jnp.log(total)).reshape(q.shape[0], q.shape[2], q.shape[1])
    return (out / per_row).reshape(*q.shape[:3], v.shape[-1]), lse


def block_backward(
    q: Array, k: Array, v: Array, whole: tuple[Array, Array, Array], seen: Array | None, rule: Rule
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) of a block in float32 or float64; `whole` is (out, lse, dout) of the whole."""
    import jax.numpy as jnp

    out, lse, dout = whole
    groups = k.shape[2]
    logits = _logits(q, k, seen, rule)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    weights = jnp.exp(logits - lse.reshape(*logits.shape[:-1])[..., None])
    shared = (dout.astype(logits.dtype) * out.astype(logits.dtype)).sum(-1)
    shared = _grouped(shared[..., None], groups)[..., 0].transpose(0, 2, 3, 1)
    grouped_dout, grouped_q = _grouped(dout, groups), _grouped(q, groups)
    dlogits = weights * (_einsum("btkgh,bskh->bkgts", grouped_dout, v) - shared[..., None])
    if rule.softcap is not None:
        free = jnp.where(logits == -jnp.inf, 0.0, logits)
        dlogits = dlogits * (1 - (free / rule.softcap) ** 2)
    dlogits = (dlogits * rule.scale).astype(q.dtype)
    dq = _einsum("bkgts,bskh->btkgh", dlogits, k).reshape(q.shape)
    dk = _einsum("bkgts,btkgh->bskh", dlogits, grouped_q)
    dv = _einsum("bkgts,btkgh->bskh", weights.astype(v.dtype), grouped_dout)
    return dq, dk, dv


def _logits(q: Array, k: Array, seen: Array | None, rule: Rule) -> Array:
    """Return logits [b, kv_heads, group, t, s], -inf where hidden."""
    import jax.numpy as jnp

    logits = capped_logits(q, k, rule.scale, rule.softcap)
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)


def _grouped(x: Array, groups: int) -> Array:
    """Return [b, t, h, d] as [b, t, groups, h / groups, d]."""
    return x.reshape(*x.shape[:2], groups, x.shape[2] // groups, x.shape[3])


def _einsum(formula: str, a: Array, b: Array) -> Any:
    import jax.numpy as jnp

    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(formula, a, b, precision=product_precision(a.dtype), preferred_element_type=wide)


CUDNN_RULE = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length", "is_training",
    "return_residual", "res", "grad_output",
)  # fmt: skip
FLOAT16_SAFE = 32768.0
"""Largest gradient of an LSE that is passed to a backward pass in float16 unscaled, as in torch_autograd."""
UNUSED_INPUTS = 4
"""Number of empty offsets and page tables; bias and lengths are empty too if there are none."""


def plain_passes(workload: Workload) -> Partial | None:
    """Return passes operator by operator, which store the scores; None for masks that carry weights."""
    if workload.visible_mask.weighted:
        return None
    rule = Rule(workload.softmax_scale, workload.softcap)

    def seen() -> Any:
        mask = workload.visible_mask
        return None if mask.kinds == ("full",) else grouped_heads(visible(mask, workload.mask_shape), workload)

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse = block_forward(q, k, v, seen(), rule)
        return out.astype(q.dtype), lse

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        grads = block_backward(q, k, v, (out, lse, dout), seen(), rule)
        dq, dk, dv = (grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v)))
        return dq, dk, dv

    return forward, backward


def cudnn_passes(workload: Workload) -> Partial | None:
    """Return cuDNN's kernels for full and top-left causal masks; None for other masks, or if JAX has changed."""
    arguments = mask_arguments(workload)
    if not arguments.at_most_causal:
        return None
    return _cudnn_kernels(workload.softmax_scale, "CAUSAL" if arguments.is_causal else "NO_MASK")


def cudnn_late_passes(scale: float, padded: bool) -> Partial | None:
    """Return cuDNN's kernels without a mask; if `padded`, key lengths int32 [b] are the last argument of both."""
    return _cudnn_kernels(scale, "PADDING" if padded else "NO_MASK")


def _cudnn_kernels(scale: float, mask: str) -> Partial | None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    rule: Any = getattr(fused, "_dot_product_attention_bwd_rule", None)
    if rule is None or tuple(inspect.signature(rule).parameters) != CUDNN_RULE:
        return None
    mask_type, layout = fused.MaskType[mask], fused.AttentionLayout.BTNH.value

    def forward(q: Array, k: Array, v: Array, *lengths: Array) -> tuple[Array, Array]:
        words = dict(zip(("q_seqlen", "kv_seqlen"), _both_lengths(q, *lengths))) if lengths else {}
        return fused.dot_product_attention(  # pyright: ignore[reportReturnType]
            q, k, v, scale=scale, mask_type=mask_type, return_residual=True, **words
        )

    def backward(
        q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, *lengths: Array
    ) -> tuple[Array, Array, Array]:
        import jax.numpy as jnp

        none = jnp.zeros(0, q.dtype)
        sizes = _both_lengths(q, *lengths) if lengths else (none, none)
        kept = (q, k, v, none, *sizes, *[none] * UNUSED_INPUTS, lse, out)
        dq, dk, dv, *_ = rule(scale, 42, 0.0, (False, False), mask_type, layout, None, True, False, kept, dout)
        return dq, dk, dv

    return forward, backward


def _both_lengths(q: Array, of_keys: Array) -> tuple[Array, Array]:
    """Return the lengths of queries (all) and of keys."""
    import jax.numpy as jnp

    return jnp.full(q.shape[:1], q.shape[1], jnp.int32), of_keys.astype(jnp.int32)


def differentiable(pair: Partial, with_lse: bool) -> Call:
    """Return `(q, k, v) -> out` or (out, lse) with the pair's backward as gradient; the LSE's gradient costs a second
    backward pass.

    Differentiable once: a library's forward pass may exclude its LSE from gradients, and second derivatives would be
    wrong.
    """
    import jax

    forward, backward = pair[0], once_differentiable(pair[1])

    def kept(q: Array, k: Array, v: Array) -> Any:
        out, lse = forward(q, k, v)
        return ((out, lse) if with_lse else out), (q, k, v, out, lse)

    def gradients(saved: tuple[Array, ...], grad: Any) -> tuple[Array, Array, Array]:
        if not with_lse:
            return backward(*saved, grad)
        dq, dk, dv = backward(*saved, grad[0])
        more_dq, more_dk = _through_lse(backward, *[*saved, grad[1]])
        return dq + more_dq, dk + more_dk, dv

    call = jax.custom_vjp(lambda q, k, v: kept(q, k, v)[0])
    call.defvjp(kept, in_usual_promotion(gradients))
    return call


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function without a derivative: differentiating raises."""
    import jax

    run = jax.custom_jvp(lambda *arrays: backward(*arrays))

    @run.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise Unsupported(
            "a backward pass that is called alone has no second derivative: ask for jax.einsum or jax.xla."
        )

    return run


def _through_lse(
    backward: Any, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array
) -> tuple[Array, Array]:
    """Return gradients of the LSE like torch_autograd: with values of 0, and an `out` whose product with `dout` is
    -dlse, in two columns."""
    import jax.numpy as jnp

    half, excess = out.dtype == jnp.float16, 1.0
    if half:  # the factor by which the largest value exceeds FLOAT16_SAFE, at least 1
        finite = jnp.where(jnp.isfinite(dlse), jnp.abs(dlse), 0.0)
        excess = jnp.maximum(jnp.max(finite) / FLOAT16_SAFE, 1.0)
        dlse = dlse / excess
    rows = dlse.transpose(0, 2, 1)
    lead = rows.astype(out.dtype)
    rest = (rows - lead.astype(rows.dtype)).astype(out.dtype)
    carrier = jnp.zeros_like(out).at[..., 0].set(-lead)
    ones = jnp.zeros_like(out).at[..., :2].set(1)
    if out.shape[-1] > 1:
        carrier = carrier.at[..., 1].set(-rest)
    dq, dk, _ = backward(q, k, jnp.zeros_like(v), carrier, lse, ones)
    if half:
        dq, dk = ((x.astype(jnp.float32) * excess).astype(x.dtype) for x in (dq, dk))
    return dq, dk


def by_turns(call: Callable[..., Any], sequences: int) -> Callable[..., Any]:
    """Return `call` on `sequences` of the batch at a time, one turn after another; 0: on all at once."""

    def turns(*arrays: Array) -> Any:
        import jax

        stacked = [x.reshape(-1, sequences, *x.shape[1:]) for x in arrays]
        results = jax.lax.map(lambda turn: call(*turn), stacked)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    return turns if sequences else call


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


def corner_of(cut: Sequence[MaskPiece]) -> Corner | None:
    """Return the pairs beside the common keys; None if there are none, too many, or no keys that every query sees."""
    if len(cut) < 2 or any(piece.first or piece.mask.kinds != ("full",) for piece in cut):
        return None
    rows, keys, last = cut[0].stop, cut[0].last, max(piece.last for piece in cut)
    if any(piece.last < keys for piece in cut) or (cut[-1].stop - rows) * (last - keys) > MOST_PAIRS:
        return None
    ends = np.concatenate([np.full(piece.stop - piece.start, piece.last) for piece in cut[1:]])
    return Corner(rows, keys, np.arange(keys, last) < ends[:, None])


def common_passes(
    inner: Implementation, workload: Workload, cut: Sequence[MaskPiece], sequences: int = 0
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

    return partial(forward_joined, forward_all, corner, rule), partial(backward_joined, backward_all, corner, rule)


def forward_joined(
    common: Callable[..., tuple[Array, Array]], corner: Corner, rule: Rule, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """Return (out, lse) of the whole; `common` computes all queries over the common keys."""
    first, keys, own = corner.rows, slice(None, corner.keys), slice(corner.keys, corner.last)
    out, lse = common(q, k[:, keys], v[:, keys])
    part = block_forward(q[:, first:], k[:, own], v[:, own], corner.seen, rule)
    whole, whole_lse = merge_parts(out[:, first:].astype(part[0].dtype), lse[..., first:], *part)
    return out.at[:, first:].set(whole.astype(out.dtype)), lse.at[..., first:].set(whole_lse)


def backward_joined(
    common: Callable[..., tuple[Array, Array, Array]], corner: Corner, rule: Rule,
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
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
