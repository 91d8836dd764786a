"""A block of attention in jax.numpy and its gradients, for sharded sequences: q [b, t, h, d] against k, v [b, s, g, d].

Unlike `jax.nn.dot_product_attention`'s, the LSE is wide and takes part in the backward pass, which is written out here:
with `out` and `lse` of a whole, the gradients of blocks add up to the whole's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attnbench.spec import Array


class Rule(NamedTuple):
    """What logits go through before the mask."""

    scale: float
    softcap: float | None


def nothing_yet(q: Array, v: Array) -> tuple[Array, Array]:
    """(out, lse) of no blocks: zeros [b, t, h, dv] and -inf [b, h, t], wide."""
    import jax.numpy as jnp

    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, tokens, heads, _ = q.shape
    return jnp.zeros((batch, tokens, heads, v.shape[-1]), wide), jnp.full((batch, heads, tokens), -jnp.inf, wide)


def merge(out: Array, lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """Two partial results as one."""
    import jax.numpy as jnp

    both = jnp.logaddexp(lse, part_lse)
    base = jnp.where(both == -jnp.inf, 0.0, both)
    kept, added = (jnp.exp(one - base).transpose(0, 2, 1)[..., None] for one in (lse, part_lse))
    return out * kept + part * added, both


def forward(q: Array, k: Array, v: Array, seen: Array | None, rule: Rule) -> tuple[Array, Array]:
    """(out, lse), both wide; `seen` [t, s] says which pairs see each other, None: all."""
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


def backward(
    q: Array, k: Array, v: Array, whole: tuple[Array, Array, Array], seen: Array | None, rule: Rule
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of one block, wide; `whole` is (out, lse, dout) of the whole."""
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
    """[b, kv_heads, group, t, s], -inf where hidden."""
    import jax.numpy as jnp

    logits = _einsum("btkgh,bskh->bkgts", _grouped(q, k.shape[2]), k) * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * jnp.tanh(logits / rule.softcap)
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)


def _grouped(x: Array, groups: int) -> Array:
    """[b, t, h, d] -> [b, t, groups, h / groups, d]"""
    return x.reshape(*x.shape[:2], groups, x.shape[2] // groups, x.shape[3])


def _einsum(formula: str, a: Array, b: Array) -> Any:
    import jax
    import jax.numpy as jnp

    wide = jnp.promote_types(a.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=wide)
