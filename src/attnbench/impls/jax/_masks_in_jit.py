"""Attention with masks that exist only inside jit: key lengths or a boolean array are arguments of the call.

`attnbench.masks` are concrete and built into a call. A model's padding is a traced array; these calls accept it, for
the libraries whose own interface does (`jax.nn`, tokamax). The registered implementation judges a stand-in mask of the
same form. A row that sees no key has the library's result: the caller replaces it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from attnbench import masks, registry
from attnbench.impls.jax._libraries import import_beside_torch
from attnbench.impls.jax.nn import JaxNn
from attnbench.impls.jax.tokamax import Tokamax
from attnbench.masks import AnyMask
from attnbench.spec import Array

Form = Literal["none", "lengths", "array"]


def stand_in(form: Form, batch: int, q_len: int, kv_len: int) -> AnyMask:
    """Return a concrete mask of the same form, by which an implementation can judge support; it hides no pair and
    stores no array."""
    if form == "lengths":
        return masks.lengths(np.full(batch, kv_len, np.int32))
    if form == "array":
        return masks.block_causal(np.zeros((1, kv_len), np.int32), np.zeros((1, q_len), np.int32))
    return masks.full()


def takes(name: str) -> str | None:
    """Return why an implementation cannot take a mask inside jit; None if it can."""
    if isinstance(registry.get(name), JaxNn | Tokamax):
        return None
    return f"{name} takes no mask that exists only inside jit"


def attend(
    name: str, q: Array, k: Array, v: Array, *, scale: float, kv_lengths: Array | None = None, mask: Array | None = None
) -> Array:
    """Return attention in layout bshd; `kv_lengths` is int32 [b], each at least 1, or `mask` booleans [b or 1, 1, q,
    kv]."""
    import jax
    import jax.numpy as jnp

    implementation = registry.get(name)
    words: dict[str, Any] = {"scale": scale}
    if kv_lengths is not None:
        words["key_value_seq_lengths"] = kv_lengths.astype(jnp.int32)
    if isinstance(implementation, JaxNn):
        if mask is not None and implementation.full_pairs:
            mask = jnp.broadcast_to(mask, (q.shape[0], q.shape[2], *mask.shape[2:]))
        words |= {"implementation": implementation.backend, "mask": mask}
        found: Any = jax.nn.dot_product_attention(q, k, v, **words)
        return found
    assert isinstance(implementation, Tokamax)
    tokamax: Any = import_beside_torch("tokamax")
    return tokamax.dot_product_attention(q, k, v, mask=mask, implementation=implementation.backend, **words)
