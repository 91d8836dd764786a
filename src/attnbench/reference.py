"""Attention written out: the executable form of what every implementation must compute.

Some key/value heads at a time, in blocks of query rows, over any array namespace (NumPy, torch, jax.numpy): in float64
it is the reference, with 16- or 32-bit inputs it is the plain implementation whose rounding error is the yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import array_api_compat
import numpy as np

from attnbench.masks import Namespace
from attnbench.spec import DTYPE_BYTES, Array, Workload

if TYPE_CHECKING:
    from jaxtyping import Float

BLOCK_PAIRS = 1 << 22
"""Number of logits held at once."""
ROUNDED_LOGIT = 1 / 9
"""Share of a row's largest logit that counts among the terms that cancel there, times how far dO V varies over its
weights."""

IN_FLOAT32 = 2.0**-13
"""One ulp of float32 in ulp of 16 bits, at most: kernels of 16 bits keep logits, LSE and soft cap in float32."""


class Gradients(NamedTuple):
    """Gradients of key/value heads: dq [..., g, t, d], dk [..., s, d], dv [..., s, dv]."""

    dq: Array
    dk: Array
    dv: Array
    cancelling: Array | None
    """[..., g, t]: the size of the terms that cancel in each row of dq, scale * |dO * out| * |P K|. A rounded output
    puts a share of it into that row, which is large if a row sees few keys and nearly all weight is on one of them; so
    do rounded logits, which move the weights and so the mean that is subtracted from dO V, and a rounded LSE, by whose
    size weights that are computed from it do not add up to 1. Near a soft cap, 1 and the square of the tangent
    hyperbolic cancel in its derivative."""
    key_terms: Array | None = None
    """Sum of squares of what such terms put into each row of dk, [..., s]."""
    dsinks: Array | None = None
    """Gradient of the heads' sinks, [..., g]; None without sinks."""


class Head(NamedTuple):
    """One key/value head of a batch row with the query heads that share it, q [g, t, d], k [s, d], v [s, dv]; or
    several of them along leading axes, q [..., g, t, d].

    `batch` and `kv_head`, one number per key/value head, only choose the mask's part; a compiled computation may trace
    them.
    """

    q: Array
    k: Array
    v: Array
    batch: int | Array
    kv_head: int | Array
    sinks: Array | None = None
    """Logits of the query heads that join every row's softmax and have no value, [..., g]; None without sinks."""


def head_of(q: Array, k: Array, v: Array, batch: int, index: int, sinks: Array | None = None) -> Head:
    """Cut one head out of bshd arrays, and its sinks out of [heads]."""
    group = q.shape[2] // k.shape[2]
    members = slice(index * group, (index + 1) * group)
    xp = array_api_compat.array_namespace(q)
    heads = xp.permute_dims(q[batch, :, members, :], (1, 0, 2))
    own = None if sinks is None else sinks[members]
    return Head(heads, k[batch, :, index, :], v[batch, :, index, :], batch, index, own)


class Rows(NamedTuple):
    """Results of some query rows: output [..., g, rows, dv], LSE [..., g, rows], and the largest weight of one key."""

    out: Array
    lse: Array
    top: Array


ALL = slice(None)


def visible_bias(
    workload: Workload, head: Head, rows: np.ndarray, namespace: Namespace, keys: slice = ALL
) -> tuple[Array, Array | None]:
    """Return visibility [..., g or 1, rows, keys] and log-weights (or None) of the heads' rows."""
    mask, shape = workload.visible_mask, workload.mask_shape
    members = np.arange(workload.group if mask.per_head else 1).reshape(-1, 1, 1)
    batch, kv_head = (x if isinstance(x, int) else x[..., None, None, None] for x in (head.batch, head.kv_head))
    index = (
        namespace.asarray(np.zeros((1, 1, 1), np.int64)) + batch,
        namespace.asarray(members) + kv_head * workload.group,
        namespace.asarray(np.asarray(rows).reshape(1, -1, 1)),
        namespace.asarray(np.arange(workload.kv_len)[keys].reshape(1, 1, -1)),
    )
    weight = mask.log_weight(shape, namespace)
    return mask.predicate(shape, namespace)(*index), None if weight is None else weight(*index)


class _Probabilities(NamedTuple):
    normal: Array
    lse: Array
    top: Array
    slope: Array | None
    """Derivative of the soft cap, or None."""
    largest: Array
    """Largest logit of each row."""
    sink: Array | None
    """Weight of each row's sink, or None."""


def _probabilities(
    workload: Workload, q: Array, k: Array, visible: Array, weight: Array | None, wide: Any, sinks: Array | None = None
) -> _Probabilities:
    xp = array_api_compat.array_namespace(q)
    products = xp.matmul(_rows_of_group(xp, q), xp.matrix_transpose(k))
    logits = xp.astype(xp.reshape(products, (*q.shape[:-1], k.shape[-2])), wide) * workload.softmax_scale
    slope = None
    if workload.softcap is not None:
        squashed = xp.tanh(logits / workload.softcap)
        logits, slope = workload.softcap * squashed, 1 - squashed * squashed
    hidden, above = xp.zeros_like(logits) - float("inf"), 0.0
    if weight is not None:
        weight, above = _shifted(xp, weight, visible, wide)
        logits = logits + weight
    logits = xp.where(visible, logits, hidden)
    top = xp.max(logits, axis=-1, keepdims=True)
    sink = None if sinks is None else xp.astype(sinks, wide)[..., None, None] - above
    top = top if sink is None else xp.maximum(top, sink)
    top = xp.where(top == -float("inf"), xp.zeros_like(top), top)
    weights = xp.exp(logits - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        sink = xp.exp(sink - top)
        total = total + sink
    empty = total == 0
    divisor = xp.where(empty, xp.ones_like(total), total)
    lse = xp.where(empty, xp.zeros_like(total) - float("inf"), above + top + xp.log(divisor))
    sink = None if sink is None else (sink / divisor)[..., 0]
    return _Probabilities(weights / divisor, lse[..., 0], (1 / divisor)[..., 0], slope, top[..., 0], sink)


def _shifted(xp: Any, weight: Array, visible: Array, wide: Any) -> tuple[Array, Array]:
    """Return weights less the largest that each row sees, and that largest one (0 if a row sees none), both finite in
    `wide`.

    A softmax does not change by it, and a logit is not rounded to the size of a large bias.
    """
    limits = xp.finfo(wide)
    weight = weight if weight.dtype == xp.float64 else xp.astype(weight, wide)
    seen = xp.where(visible, weight, xp.zeros_like(weight) - float("inf"))
    top = xp.max(seen, axis=-1, keepdims=True)
    top = xp.where(top == -float("inf"), xp.zeros_like(top), top)
    with np.errstate(over="ignore"):
        rest = xp.where(visible, weight - top, xp.zeros_like(weight))
    return tuple(xp.astype(xp.clip(x, float(limits.min), float(limits.max)), wide) for x in (rest, top))


def _rows_of_group(xp: Any, array: Array) -> Array:
    """Reshape [..., g, t, d] to [..., g * t, d]."""
    return xp.reshape(array, (*array.shape[:-3], -1, array.shape[-1]))


def _matmul(xp: Any, rows: Array, keys: Array) -> Array:
    """Return [..., g, t, s] @ [..., s, d] of the key/value head that the group shares."""
    return xp.reshape(xp.matmul(_rows_of_group(xp, rows), keys), (*rows.shape[:-1], keys.shape[-1]))


def _contained(xp: Any, probabilities: Array, v: Array) -> Array:
    """Return P @ V in which a non-finite value reaches only the rows that see it (0 x NaN is 0 here)."""
    finite = xp.isfinite(v)
    if bool(xp.all(finite)):
        return _matmul(xp, probabilities, v)
    clean = _matmul(xp, probabilities, xp.where(finite, v, xp.zeros_like(v)))
    touched = _matmul(xp, xp.astype(probabilities > 0, v.dtype), xp.astype(~finite, v.dtype)) > 0
    return xp.where(touched, xp.zeros_like(clean) + float("nan"), clean)


def forward_rows(
    workload: Workload,
    head: Head,
    rows: np.ndarray,
    namespace: Namespace,
    wide: Any,
    keys: slice = ALL,
    *,
    contain: bool = False,
    cut: bool = False,
) -> Rows:
    """Attend from some query rows; softmax in `wide`, products in the inputs' precision.

    No row may see a key outside `keys`. `cut`: head.q holds these rows alone, in their order.
    """
    xp = array_api_compat.array_namespace(head.q)
    visible, weight = visible_bias(workload, head, rows, namespace, keys)
    taken = head.q if cut else xp.take(head.q, namespace.asarray(np.asarray(rows)), axis=-2)
    p = _probabilities(workload, taken, head.k[..., keys, :], visible, weight, wide, head.sinks)
    v = head.v[..., keys, :]
    narrow = xp.astype(p.normal, v.dtype)
    out = _contained(xp, narrow, v) if contain else _matmul(xp, narrow, v)
    return Rows(out, p.lse, p.top)


def logit_gaps(
    workload: Workload, head: Head, rows: np.ndarray, namespace: Namespace, keys: slice = ALL
) -> tuple[Array, Array]:
    """Return how far the largest logit of some query rows is above the second, and the largest size of one.

    [..., g, rows] each, in the precision of the inputs and without a soft cap. A row that sees one key or none has an
    infinite gap. No size is below that of a sum of unlike terms of this length.
    """
    xp = array_api_compat.array_namespace(head.q)
    k, scale = head.k[..., keys, :], workload.softmax_scale
    q = xp.take(head.q, namespace.asarray(np.asarray(rows)), axis=-2)
    visible, weight = visible_bias(workload, head, rows, namespace, keys)
    logits = _matmul(xp, q, xp.matrix_transpose(k)) * scale
    longest = xp.max(xp.linalg.vector_norm(k, axis=-1), axis=-1)[..., None, None]
    least = abs(scale) * q.shape[-1] ** -0.5 * longest * xp.linalg.vector_norm(q, axis=-1)
    largest = xp.maximum(least, xp.max(xp.where(visible, xp.abs(logits), xp.zeros_like(logits)), axis=-1))
    if weight is not None:
        logits = logits + xp.astype(weight, logits.dtype)
    hidden = xp.zeros_like(logits) - float("inf")
    logits = xp.where(visible, logits, hidden)
    top = xp.max(logits, axis=-1, keepdims=True)
    ties = xp.sum(xp.astype(visible & (logits == top), logits.dtype), axis=-1) > 1
    second = xp.max(xp.where(logits == top, hidden, logits), axis=-1)
    alone = second == -float("inf")
    gap = top[..., 0] - xp.where(alone, xp.zeros_like(second), second)
    gap = xp.where(alone, xp.zeros_like(gap) + float("inf"), gap)
    return xp.where(ties, xp.zeros_like(gap), gap), largest


def backward_rows(
    workload: Workload,
    head: Head,
    dout: Array,
    rows: np.ndarray,
    namespace: Namespace,
    wide: Any,
    terms: bool = False,
    keys: slice = ALL,
    *,
    cut: bool = False,
) -> Gradients:
    """Return what some query rows contribute: dq of those rows, dk and dv of `keys` summed over them and the group.

    With `terms` also what cancels. No row may see a key outside `keys`. `cut`: head.q and dout hold these rows alone,
    in their order.
    """
    xp = array_api_compat.array_namespace(head.q)
    head = head._replace(k=head.k[..., keys, :], v=head.v[..., keys, :])
    index = namespace.asarray(np.asarray(rows))
    q, dout = (head.q, dout) if cut else (xp.take(x, index, axis=-2) for x in (head.q, dout))
    visible, weight = visible_bias(workload, head, rows, namespace, keys)
    p = _probabilities(workload, q, head.k, visible, weight, wide, head.sinks)
    narrow = xp.astype(p.normal, head.v.dtype)
    out = _matmul(xp, narrow, head.v)
    shared = xp.sum(xp.astype(dout, wide) * xp.astype(out, wide), axis=-1, keepdims=True)
    dlogits = uncapped = p.normal * (xp.astype(_matmul(xp, dout, xp.matrix_transpose(head.v)), wide) - shared)
    dsinks = None if p.sink is None else -xp.sum(p.sink * shared[..., 0], axis=-1)
    if p.slope is not None:
        dlogits = dlogits * p.slope
    cancelling = key_terms = None
    if terms:
        scale, ulp = abs(workload.softmax_scale), IN_FLOAT32 if DTYPE_BYTES[workload.dtype] == 2 else 1.0
        reached = p.normal if p.slope is None else p.normal * p.slope
        mean_key = xp.linalg.vector_norm(_matmul(xp, xp.astype(reached, head.k.dtype), head.k), axis=-1)
        size = ulp * xp.where(xp.isfinite(p.lse), xp.abs(p.lse), xp.zeros_like(p.lse))
        products = (1 + size) * xp.linalg.vector_norm(xp.astype(dout, wide) * xp.astype(out, wide), axis=-1)
        products = products + (ROUNDED_LOGIT * xp.abs(p.largest) + size) * xp.sum(xp.abs(dlogits), axis=-1)
        cancelling = scale * products * xp.astype(mean_key, wide)
        of_q = scale * xp.linalg.vector_norm(xp.astype(q, wide), axis=-1)
        key_terms = xp.sum((reached * (products * of_q)[..., None]) ** 2, axis=(-3, -2))
        if p.slope is not None:
            of_k = xp.astype(xp.linalg.vector_norm(head.k, axis=-1), wide)[..., None, None, :]
            cancelling = cancelling + scale * ulp * xp.linalg.vector_norm(uncapped * of_k, axis=-1)
            key_terms = key_terms + xp.sum((ulp * uncapped * of_q[..., None]) ** 2, axis=(-3, -2))
    dlogits = xp.astype(dlogits * workload.softmax_scale, head.q.dtype)
    by_keys = (xp.matrix_transpose(_rows_of_group(xp, x)) for x in (dlogits, narrow))
    dk, dv = (xp.matmul(x, _rows_of_group(xp, y)) for x, y in zip(by_keys, (q, dout)))
    return Gradients(_matmul(xp, dlogits, head.k), dk, dv, cancelling, key_terms, dsinks)


def row_blocks(workload: Workload, rows: np.ndarray, pairs: int = BLOCK_PAIRS, heads: int = 1) -> list[np.ndarray]:
    """Return the rows in blocks whose logits, for so many key/value heads, stay small."""
    size = max(1, pairs // (heads * workload.group * workload.kv_len))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def attention(
    workload: Workload,
    q: Float[np.ndarray, "b t h d"],
    k: Float[np.ndarray, "b s g d"],
    v: Float[np.ndarray, "b s g e"],
    sinks: Float[np.ndarray, " h"] | None = None,
) -> tuple[Float[np.ndarray, "b t h e"], Float[np.ndarray, "b h t"]]:
    """Return the whole output and LSE in NumPy, in the precision of the inputs, without holding T x S.

    `sinks` are logits that join every row's softmax and have no value.
    """
    out = np.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), q.dtype)
    for head, heads, rows in _parts(workload, q, k, v, sinks):
        part, part_lse, _ = forward_rows(workload, head, rows, np, q.dtype, contain=True)
        out[head.batch, rows[0] : rows[-1] + 1, heads] = part.transpose(1, 0, 2)
        lse[head.batch, heads, rows[0] : rows[-1] + 1] = part_lse
    return out, lse


def _parts(
    workload: Workload, q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None
) -> Iterator[tuple[Head, slice, np.ndarray]]:
    """Yield every key/value head in blocks of query rows: the head, its query heads, and the rows."""
    for batch, index in np.ndindex(q.shape[0], k.shape[2]):
        head = head_of(q, k, v, batch, index, sinks)
        for rows in row_blocks(workload, np.arange(q.shape[1])):
            yield head, slice(index * workload.group, (index + 1) * workload.group), rows


def attention_gradients(
    workload: Workload, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dv in NumPy, bshd, in the precision of the inputs; with sinks also their gradient [h]."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dsinks = np.zeros(q.shape[2], q.dtype)
    for head, heads, rows in _parts(workload, q, k, v, sinks):
        part = backward_rows(workload, head, dout[head.batch, :, heads].transpose(1, 0, 2), rows, np, q.dtype)
        dq[head.batch, rows[0] : rows[-1] + 1, heads] = part.dq.transpose(1, 0, 2)
        dk[head.batch, :, head.kv_head] += part.dk
        dv[head.batch, :, head.kv_head] += part.dv
        if part.dsinks is not None:
            dsinks[heads] += part.dsinks
    return (dq, dk, dv) if sinks is None else (dq, dk, dv, dsinks)
