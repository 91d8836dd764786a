"""Properties that hold for attention whatever the numbers are, and what becomes of a NaN that the mask hides."""

from __future__ import annotations

import array_api_compat
import numpy as np

from attnbench.frameworks import Inputs
from attnbench.measuring.subject import Subject, Wrong
from attnbench.measuring.tolerance import EPS
from attnbench.spec import Array

ROWS_LOOKED_AT = 64
ULPS = {"float64": 64, "float32": 64, "float16": 4, "bfloat16": 2}


def check(subject: Subject, thorough: bool) -> tuple[str, ...]:
    """Names of the properties that hold; raises Wrong otherwise. V = 1 always, the rest when thorough."""
    w = subject.workload
    if w.pass_ == "backward":
        return ()
    held = ["V = 1 gives 1"]
    _ones(subject)
    if not thorough:
        return tuple(held)
    if w.batch > 1 and not w.visible_mask.per_batch:
        _permuted_batch(subject)
        held.append("permuted batch")
    if w.kv_heads > 1 and not w.visible_mask.per_head:
        _permuted_heads(subject)
        held.append("permuted heads")
    if (spot := _first_hidden(subject)) is not None:
        _changed_unseen(subject, *spot)
        held.append("an unseen key changes nothing")
    return tuple(held)


def hidden_nan(subject: Subject) -> str:
    """`contained` when a NaN key and value that some rows do not see leaves those rows finite, else `leaks`."""
    spot = _first_hidden(subject)
    if spot is None or subject.workload.pass_ == "backward":
        return ""
    batch, key, rows = spot
    out = subject.output(_with_key(subject, batch, key, float("nan")), batch)[rows]
    return "contained" if np.isfinite(out).all() else "leaks"


def _with_key(subject: Subject, batch: int, key: int, value: float) -> Inputs:
    """The first input set with one key and its value replaced."""
    first = subject.draws.inputs(subject.layout)[0]
    index = (batch, key) if subject.layout == "bshd" else (batch, slice(None), key)
    k, v = (subject.framework.put(array, index, value) for array in (first.k, first.v))
    return first._replace(k=k, v=v)


def _tolerance(subject: Subject) -> float:
    """Relative: what the dtype's rounding explains."""
    if subject.declared_error is not None:
        return 4 * subject.declared_error
    return EPS[subject.workload.dtype] * ULPS[subject.workload.dtype]


def _differ(subject: Subject, before: np.ndarray, after: np.ndarray) -> str:
    """How far two results that should agree are apart, relative to their size; empty when rounding explains it."""
    size = float(np.linalg.norm(before))
    apart = float(np.linalg.norm(before.astype(np.float64) - after)) / (size or 1.0)
    return "" if apart <= _tolerance(subject) else f"{apart:.1e}"


def _take(subject: Subject, array: Array, order: np.ndarray, axis: int) -> Array:
    index = subject.framework.namespace(subject.device).asarray(order)
    return array_api_compat.array_namespace(array).take(array, index, axis=axis)


def _ones(subject: Subject) -> None:
    first = subject.draws.inputs(subject.layout)[0]
    batch = int(np.random.default_rng(subject.draws.seed).integers(subject.workload.batch))
    out = subject.output(first._replace(v=subject.framework.put(first.v, (...,), 1.0)), batch)
    error = np.abs(out - _row_sees(subject, batch)[..., None]).max()
    if not error <= _tolerance(subject):
        raise Wrong(f"V = 1 does not give 1 on every row that sees a key (off by {error:.1e})")


def _row_sees(subject: Subject, batch: int) -> np.ndarray:
    """[q, heads or 1] 1 where a row sees any key, else 0."""
    mask, shape = subject.workload.visible_mask, subject.workload.mask_shape
    interval = mask.interval(shape)
    if interval is not None:
        low, high = (np.clip(edge[min(batch, len(edge) - 1)], 0, shape.kv_len) for edge in interval)
        return (high > low).astype(np.float64)[:, None]
    rows = max(1, (1 << 24) // shape.kv_len // shape.heads)
    blocks = [mask.array(shape, np.arange(n, min(n + rows, shape.q_len))) for n in range(0, shape.q_len, rows)]
    seen = np.concatenate([block[min(batch, len(block) - 1)].any(axis=-1) for block in blocks], axis=-1)
    return seen.T.astype(np.float64)


def _permuted_batch(subject: Subject) -> None:
    first = subject.draws.inputs(subject.layout)[0]
    turned = Inputs(*(_take(subject, x, np.arange(subject.workload.batch)[::-1].copy(), 0) for x in first))
    if apart := _differ(subject, subject.output(first, 0), subject.output(turned, subject.workload.batch - 1)):
        raise Wrong(f"permuting the batch does not permute the output (off by {apart})")


def _permuted_heads(subject: Subject) -> None:
    w = subject.workload
    first = subject.draws.inputs(subject.layout)[0]
    kv_order = np.arange(w.kv_heads)[::-1].copy()
    order = np.arange(w.heads).reshape(w.kv_heads, w.group)[::-1].ravel()
    orders = (order, kv_order, kv_order, order)
    turned = Inputs(*(_take(subject, x, o, subject.head_axis) for x, o in zip(first, orders)))
    if apart := _differ(subject, subject.output(first, 0)[:, order], subject.output(turned, 0)):
        raise Wrong(f"permuting the heads does not permute the output (off by {apart})")


def _first_hidden(subject: Subject) -> tuple[int, int, np.ndarray] | None:
    """A batch row, a key, and query rows that see it in no head; None when the looked-at rows see everything."""
    mask, shape = subject.workload.visible_mask, subject.workload.mask_shape
    rows = np.unique(np.linspace(0, shape.q_len - 1, min(shape.q_len, ROWS_LOOKED_AT)).astype(int))
    seen = np.asarray(mask.array(shape, rows).any(axis=1))
    for batch, hidden in enumerate(np.logical_not(seen)):
        if hidden.any():
            key = int(np.argmax(hidden.sum(axis=0)))
            return batch, key, rows[hidden[:, key]]
    return None


def _changed_unseen(subject: Subject, batch: int, key: int, rows: np.ndarray) -> None:
    before = subject.output(subject.draws.inputs(subject.layout)[0], batch)[rows]
    after = subject.output(_with_key(subject, batch, key, 3.0), batch)[rows]
    if apart := _differ(subject, before, after):
        raise Wrong(f"key {key} changes rows that cannot see it (by {apart}): the mask leaks")
