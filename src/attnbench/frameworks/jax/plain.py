"""Plain attention in jax.numpy, the body of `jax.einsum`, and the arrays that masks become in JAX.

Masks become arrays here, inside the traced call: positions are iotas that XLA fuses, only a mask's own data is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnbench.masks import Blocks, Dense, Mask, MaskShape
from attnbench.masks.large_bias import shifted
from attnbench.spec import Array, CacheCall, Call, Workload

if TYPE_CHECKING:
    import jax

ROW_BLOCK = 1 << 24
"""Pairs looked at in one go on the host."""


def in_usual_promotion(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in which jax.numpy promotes ranks and dtypes by its default rules, whatever the user set."""
    import jax

    def run(*arrays: Any) -> Any:
        rank, dtype = jax.config.jax_numpy_rank_promotion, jax.config.jax_numpy_dtype_promotion  # pyright: ignore[reportAttributeAccessIssue]
        if (rank, dtype) == ("allow", "standard"):
            return call(*arrays)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return call(*arrays)

    return run


def visible(mask: Mask, shape: MaskShape) -> jax.Array:
    """Return visibility [b|1, h|1, q, kv] as booleans, made of iotas and the mask's data."""
    import jax.numpy as jnp

    seen = None
    for part in mask.split():
        # Stored arrays are broadcast or repeated, since a lookup of every pair is a slow gather in XLA.
        if isinstance(part, Dense):
            values = part.values.array
            pairs: Any = jnp.asarray(_four_axes(values != -np.inf if part.weighted else values))
        elif isinstance(part, Blocks):
            kept = jnp.asarray(_four_axes(part.block_mask.array))
            kept = jnp.repeat(jnp.repeat(kept, part.block_size, axis=2), part.block_size, axis=3)
            pairs = kept[:, :, : shape.q_len, : shape.kv_len]
        else:
            pairs = part.predicate(shape, jnp)(*_indices(part, shape))  # pyright: ignore[reportArgumentType]
        seen = pairs if seen is None else seen & pairs
    assert seen is not None
    return jnp.broadcast_to(seen, np.broadcast_shapes(seen.shape, (1, 1, shape.q_len, shape.kv_len)))


def log_weight(mask: Mask, shape: MaskShape, dtype: Any) -> Any:
    """Return what is added to the logits of visible pairs, broadcastable to [b, h, q, kv]; None for unweighted masks.

    A large bias lacks what is added to whole rows: see `row_tops`.
    """
    import jax.numpy as jnp

    if (shift := shifted(mask, shape, dtype)) is not None:
        return jnp.asarray(shift.weight)
    total = None
    for part in mask.split():
        if isinstance(part, Dense) and part.weighted:
            values = part.values.array
            logs = jnp.asarray(_four_axes(np.where(values == -np.inf, 0, values)), dtype)
        elif (weight := part.log_weight(shape, jnp)) is not None:  # pyright: ignore[reportArgumentType]
            logs = weight(*_indices(part, shape)).astype(dtype)
        else:
            continue
        total = logs if total is None else total + logs
    return total


def row_tops(workload: Workload) -> np.ndarray | None:
    """Return what the LSE lacks in rows with a large bias, [b|1, h|1, q] on the host; None if nothing."""
    wide = np.float64 if workload.dtype == "float64" else np.float32
    shift = shifted(workload.visible_mask, workload.mask_shape, wide)
    return None if shift is None else shift.top


def _four_axes(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _indices(part: Mask, shape: MaskShape) -> list[Any]:
    """Return the mask's own index arrays as iotas, so that a T x S table is never a constant of the program."""
    from jax import lax

    sizes = [index.shape for index in part.indices(shape)]
    return [lax.broadcasted_iota("int32", size, axis) for axis, size in enumerate(sizes)]


def rows_that_see(mask: Mask, shape: MaskShape) -> np.ndarray | None:
    """Return which rows see a key, [b|1, q, h|1] on the host; None if every row does."""
    interval = mask.interval(shape)
    if interval is not None:
        low, high = (np.clip(edge, 0, shape.kv_len) for edge in interval)
        seen = (high > low)[:, :, None]
    else:
        rows = max(1, ROW_BLOCK // (shape.kv_len * shape.batch * shape.heads))
        starts = range(0, shape.q_len, rows)
        blocks = [mask.array(shape, np.arange(start, min(start + rows, shape.q_len))).any(-1) for start in starts]
        seen = np.concatenate(blocks, axis=2).transpose(0, 2, 1)
    return None if seen.all() else seen


def zero_blind_rows(out: Array, rows: np.ndarray | None) -> Array:
    """Return an output [b, q, h, d] with 0 (and no gradient) in rows that see no key."""
    import jax.numpy as jnp

    return out if rows is None else jnp.where(jnp.asarray(rows)[..., None], out, jnp.zeros((), out.dtype))


def whole_lse(lse: Array, rows: np.ndarray | None, tops: np.ndarray | None) -> Array:
    """Return the LSE [b, h, q] with what a large bias adds to a row, -inf in rows that see no key; float32 or 64."""
    import jax.numpy as jnp

    lse = lse.astype(jnp.promote_types(lse.dtype, jnp.float32))
    lse = lse if tops is None else lse + jnp.asarray(tops)
    return lse if rows is None else jnp.where(jnp.asarray(rows).transpose(0, 2, 1), lse, -jnp.inf)


def plain_call(workload: Workload, with_lse: bool = False) -> Call:
    """Return a grouped einsum in bshd; logits and softmax are float32 (float64 for float64), weights in the dtype."""
    rows, tops = rows_that_see(workload.visible_mask, workload.mask_shape), row_tops(workload) if with_lse else None

    def call(q: Array, k: Array, v: Array) -> Any:
        logits = _masked_logits(workload, q, k)
        out = zero_blind_rows(_weighted_values(logits, v), rows)
        return (out, _lse(logits, rows, tops)) if with_lse else out

    return call


def product_precision(dtype: Any) -> Any:
    """Return the precision of products of a dtype: float32 is not rounded to TF32."""
    from jax.lax import Precision

    return Precision.HIGHEST if dtype == np.float32 else None


def logits_dtype(dtype: Any) -> Any:
    """Return the dtype of logits: float32, or float64 for float64 inputs."""
    import jax.numpy as jnp

    return jnp.promote_types(dtype, jnp.float32)


def plain_lse(workload: Workload, q: Array, k: Array, rows: np.ndarray | None) -> Array:
    """Return only the LSE, differentiable; `rows` are the rows that see a key."""
    return _lse(_masked_logits(workload, q, k), rows, row_tops(workload))


def _lse(logits: Array, rows: np.ndarray | None, tops: np.ndarray | None) -> Array:
    """Return the LSE [b, h, q] of logits [b, kv_heads, group, q, kv]."""
    import jax

    b, kv_heads, group, q_len, _ = logits.shape
    return whole_lse(jax.nn.logsumexp(logits, axis=-1).reshape(b, kv_heads * group, q_len), rows, tops)


def _weighted_values(logits: Array, v: Array) -> Array:
    """Return the output [b, q, h, d] of logits [b, kv_heads, group, q, kv]; weights are rounded to the dtype of v."""
    import jax
    import jax.numpy as jnp

    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=product_precision(v.dtype))
    return out.reshape(*out.shape[:2], -1, v.shape[-1])


def _masked_logits(workload: Workload, q: Array, k: Array) -> Array:
    """Return logits [b, kv_heads, group, q, kv], finite and very low if hidden."""
    logits = capped_logits(q, k, workload.softmax_scale, workload.softcap)
    mask, shape = workload.visible_mask, workload.mask_shape
    if mask.kinds == ("full",):
        return logits
    return _hidden(logits, workload, visible(mask, shape), log_weight(mask, shape, logits.dtype))


def capped_logits(q: Array, k: Array, scale: float, softcap: float | None) -> Array:
    """Return scaled and capped logits [b, kv_heads, group, q, kv] of q and k in bshd, without a mask."""
    import jax.numpy as jnp

    dtype, precision = logits_dtype(q.dtype), product_precision(q.dtype)
    grouped = q.reshape(*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2], q.shape[3])
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, precision=precision, preferred_element_type=dtype)
    logits = logits * jnp.asarray(scale, dtype)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _hidden(logits: Array, workload: Workload, seen: Array, weight: Array | None) -> Array:
    """Return the logits with weights added, and very low where a pair is not seen."""
    import jax.numpy as jnp

    if weight is not None:
        logits = logits + grouped_heads(weight.astype(logits.dtype), workload)
    # Finite, so that a row without any visible key has gradients of 0 and not NaN.
    return jnp.where(grouped_heads(seen, workload), logits, -0.7 * float(jnp.finfo(logits.dtype).max))


def grouped_heads(array: Array, workload: Workload) -> Array:
    """Reshape [b|1, h|1, q, kv] to [b|1, kv_heads|1, group|1, q, kv]."""
    b, h, *pair = array.shape
    return array.reshape(b, 1, 1, *pair) if h == 1 else array.reshape(b, workload.kv_heads, workload.group, *pair)


def attend_with_arrays(
    workload: Workload, q: Array, k: Array, v: Array, seen: Array, weight: Array | None, with_lse: bool = False
) -> tuple[Array, Array | None]:
    """Return (out, LSE or None) in layout bshd with a mask that is an argument: arrays [b|1, h|1, q|1, kv|1].

    The workload's own mask is not looked at. A row that sees no key has equal logits, so the caller must clear its
    output.
    """
    logits = _hidden(capped_logits(q, k, workload.softmax_scale, workload.softcap), workload, seen, weight)
    return _weighted_values(logits, v), _lse(logits, None, None) if with_lse else None


def cache_arrays(q: Array, k: Array, v: Array, lengths: Array, table: Array | None) -> tuple[Array, Array, Array]:
    """Return keys and values [b, capacity, kv_heads, d] of a KV cache, and which are there, [b, capacity].

    What lies behind the end of a sequence is replaced: 0 in values, as 0 times NaN is NaN, and page 0 in the table.
    """
    import jax.numpy as jnp

    size = k.shape[1]
    capacity = size if table is None else table.shape[1] * size
    live = jnp.arange(capacity) < lengths[:, None]
    if table is not None:
        pages = jnp.where(live[:, ::size], table, 0)
        k, v = (x[pages].reshape(pages.shape[0], capacity, *x.shape[2:]) for x in (k, v))
    return k, jnp.where(live[..., None, None], v, 0), live


def plain_decode(workload: Workload) -> CacheCall:
    """Return a CacheCall by a grouped einsum over the whole capacity, masked by the lengths."""
    left = getattr(workload.visible_mask, "left", None)

    def call(q: Array, k: Array, v: Array, lengths: Array, table: Array | None) -> tuple[Array, Array]:
        import jax
        import jax.numpy as jnp

        keys, values, live = cache_arrays(q, k, v, lengths, table)
        rows, at = lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1]), jnp.arange(keys.shape[1])
        seen = live[:, None] & (at <= rows[..., None])
        if left is not None:
            seen = seen & (at >= rows[..., None] - left)
        logits = capped_logits(q, keys, workload.softmax_scale, workload.softcap)
        logits = jnp.where(seen[:, None, None], logits, -0.7 * float(jnp.finfo(logits.dtype).max))
        sees = seen.any(-1)
        out = jnp.where(sees[..., None, None], _weighted_values(logits, values), 0)
        lse = jax.nn.logsumexp(logits, axis=-1).reshape(q.shape[0], q.shape[2], q.shape[1])
        return out.astype(q.dtype), jnp.where(sees[:, None], lse, -jnp.inf).astype(jnp.float32)

    return call


def kind_of_device(array: Array) -> str:
    """Return our name of an array's device; for an array that is traced or only a shape, the default device.

    The default is that of `jax.default_device` if one is in force: a program traced under it is compiled for it.
    """
    import jax
    from jax.core import Tracer

    from attnbench import frameworks

    if isinstance(array, Tracer | jax.ShapeDtypeStruct):
        default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        platform = getattr(default, "platform", default)
    else:
        platform = next(iter(array.devices())).platform
    return "cpu" if platform == "cpu" else frameworks.get("jax").devices()[0]
