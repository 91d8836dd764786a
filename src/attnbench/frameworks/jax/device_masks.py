"""Attention in JAX under a mask whose values are arguments of the call: arrays made inside the traced program.

A call is `(q, k, v, *values)`; arrays are bshd, or [tokens, heads, dim] if sequences are packed. Rows that see no key
give 0, an LSE of -inf and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnbench.frameworks.jax import plain
from attnbench.masks.device import MaskForm
from attnbench.masks.packed import inside_of, padding_is_cheaper, places, rows_of, visible_in_batch, visible_in_rows
from attnbench.spec import Array, ValuesCall, Workload

Attend = Callable[[Array, Array, Array, Array, Any], Any]
"""Function (q, k, v, seen, weight) of bshd arrays -> (out, LSE or None); every row of `seen` sees a key."""


class JaxNamespace:
    """The functions of jax.numpy that packed sequences need."""

    def arange(self, size: int, /) -> Array:
        """Return 0, 1, ... in 32 bits."""
        import jax.numpy as jnp

        return jnp.arange(size, dtype=jnp.int32)

    def searchsorted(self, ends: Array, tokens: Array, /) -> Array:
        """Return how many of the sorted ends each token has reached."""
        import jax.numpy as jnp

        return jnp.searchsorted(ends, tokens, side="right")

    def clip(self, x: Array, low: int, high: int, /) -> Array:
        """Return x within low ... high."""
        import jax.numpy as jnp

        return jnp.clip(x, low, high)


JAX_NAMESPACE = JaxNamespace()


def plain_values_call(workload: Workload, form: MaskForm, with_lse: bool) -> ValuesCall:
    """Return the grouped einsum."""

    def attend(q: Array, k: Array, v: Array, seen: Array, weight: Any) -> Any:
        return plain.attend_with_arrays(workload, q, k, v, seen, weight, with_lse)

    return values_call(workload, form, with_lse, attend)


def values_call(workload: Workload, form: MaskForm, with_lse: bool, attend: Attend) -> ValuesCall:
    """Return a call (q, k, v, *values) from a function of arrays with their mask as arrays."""
    seen_alone = _where_seen(attend)
    run = _packed(form, seen_alone) if form.packed else _batched(workload, form, seen_alone)
    return run if with_lse else lambda *arrays: run(*arrays)[0]


def _where_seen(attend: Attend) -> Attend:
    """Return a function that shows all keys to rows that see none, and gives 0 and -inf there."""
    import jax.numpy as jnp

    def run(q: Array, k: Array, v: Array, seen: Array, weight: Any) -> Any:
        sees = seen.any(-1, keepdims=True)
        out, lse = attend(q, k, v, seen | ~sees, weight)
        out = jnp.where(sees.transpose(0, 2, 1, 3), out, jnp.zeros((), out.dtype))
        return out, None if lse is None else jnp.where(sees[..., 0], lse, -jnp.inf)

    return run


def _batched(workload: Workload, form: MaskForm, attend: Attend) -> ValuesCall:
    from jax import lax

    shape = workload.mask_shape

    def run(q: Array, k: Array, v: Array, *values: Array) -> Any:
        sizes = (shape.batch, 1, shape.q_len, shape.kv_len)
        axes = [[size if n == axis else 1 for n in range(4)] for axis, size in enumerate(sizes)]
        index = [lax.broadcasted_iota("int32", axis, n) for n, axis in enumerate(axes)]
        seen = plain.visible(form.fixed, shape)
        for predicate in form.predicates(values, shape.q_len, shape.kv_len):
            seen = seen & predicate(*index)
        weight = plain.log_weight(form.fixed, shape, plain.logits_dtype(q.dtype))
        return attend(q, k, v, seen, weight)

    return run


def _packed(form: MaskForm, attend: Attend) -> ValuesCall:
    inside, same = inside_of(form.fixed), form.same_offsets

    def run(q: Array, k: Array, v: Array, *values: Any) -> Any:
        import jax.numpy as jnp

        *offsets, q_longest, k_longest = values
        q_offsets, k_offsets = offsets[0], offsets[0 if same else 1]
        tokens, longest = (q.shape[0], k.shape[0]), (q_longest, k_longest)
        q_places = places(q_offsets, tokens[0], JAX_NAMESPACE)
        if padding_is_cheaper(q_offsets.shape[0] - 1, longest, tokens):
            seen = visible_in_batch(inside, q_offsets, k_offsets, longest, JAX_NAMESPACE)
            q, k, v = padded_batch((q, k, v), (q_offsets, k_offsets), longest)
            out, lse = attend(q, k, v, seen, None)
            out = packed_again(out, q_places)
            lse = None if lse is None else packed_again(lse.swapaxes(1, 2), q_places).T
        else:
            k_places = q_places if same else places(k_offsets, tokens[1], JAX_NAMESPACE)
            seen = visible_in_rows(inside, q_offsets, k_offsets, q_places, k_places)
            out, lse = attend(q[None], k[None], v[None], seen, None)
            out, lse = out[0], None if lse is None else lse[0]
        out = jnp.where(q_places.inside[:, None, None], out, jnp.zeros((), out.dtype))
        return out, None if lse is None else jnp.where(q_places.inside, lse, -jnp.inf)

    return run


def padded_batch(
    arrays: tuple[Array, Array, Array], offsets: tuple[Array, Array], longest: tuple[int, int]
) -> list[Array]:
    """Return packed q, k and v as batches [sequences, longest, heads, dim]; padding has any numbers of theirs."""
    q_rows, k_rows = (
        rows_of(offset, size, x.shape[0], JAX_NAMESPACE) for offset, size, x in zip(offsets, longest, arrays)
    )
    return [x[rows] for x, rows in zip(arrays, (q_rows, k_rows, k_rows))]


def packed_again(batch: Array, q_places: Any) -> Array:
    """Return [tokens, ...] from a padded batch [sequences, longest, ...]."""
    position = JAX_NAMESPACE.clip(q_places.position, 0, batch.shape[1] - 1)
    return batch[q_places.sequence, position]
