"""Properties that hold for attention whatever the numbers are, and what becomes of a NaN that the mask hides."""

from __future__ import annotations

import array_api_compat
import numpy as np

from attnbench.frameworks import Inputs
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.tolerance import EPS, SUMMED_ULPS

ROWS_LOOKED_AT = 64
PAIRS_LOOKED_AT = 1 << 28
"""On the host, about a second."""
VALUES = {"float16": 2.0**15}
"""Of V, 1 otherwise: sums of unnormalised weights times values that are kept in float16 end at 65504."""
ULPS = {"float64": 64, "float32": 64, "float16": 4, "bfloat16": 2}


def check(subject: Subject, thorough: bool) -> tuple[str, ...]:
    """Names of the properties that hold; raises Wrong otherwise. V of one
    value always, an unseen key when thorough."""
    w = subject.workload
    if w.pass_ == "backward":
        return ()
    held = [_same_values(subject)]
    if not thorough:
        return tuple(held)
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
    dtype = subject.workload.dtype
    return EPS[dtype] * (ULPS[dtype] + 2 * SUMMED_ULPS.get(dtype, 0.0) * subject.workload.kv_len**0.5)


def _differ(subject: Subject, before: np.ndarray, after: np.ndarray) -> str:
    """How far two results that should agree are apart, relative to their size; empty when rounding explains it."""
    size = float(np.linalg.norm(before))
    apart = float(np.linalg.norm(before.astype(np.float64) - after)) / (size or 1.0)
    return "" if apart <= _tolerance(subject) else f"{apart:.1e}"


def _same_values(subject: Subject) -> str:
    """Require of every row of every head that one value in all of V gives that value: weights may sum to something
    else, or a row may have been left out. Returns the property."""
    fw, first, dtype = subject.framework, subject.draws.inputs(subject.layout)[0], subject.workload.dtype
    value = VALUES.get(dtype, 1.0)
    out = run(subject.programs.main, first._replace(v=fw.put(first.v, (...,), value)))[0]
    wide = "float64" if dtype == "float64" else "float32"
    known = _rows_see(subject)
    sees = fw.transpose(fw.array(known[..., None], wide, subject.device), "bshd", subject.layout)
    xp = array_api_compat.array_namespace(out)
    off = xp.abs(fw.cast(out, wide) / value - sees)
    if np.isnan(known).any():
        off = xp.where(xp.isnan(sees), xp.zeros_like(off), off)
    error = float(fw.numpy(xp.max(off)))
    if not error <= _tolerance(subject):
        raise Wrong(f"V = {value:g} does not give {value:g} on every row that sees a key (off by {error:.1e} of it)")
    return f"V = {value:g} gives {value:g}"


def _rows_see(subject: Subject) -> np.ndarray:
    """[batch or 1, q, heads or 1] 1 where a row sees any key, 0 where it sees none, NaN where that was not looked up.

    Where rows see more than a run of keys, the key at a row's own place is looked at first, and all keys only for rows
    that do not see that one, as far as PAIRS_LOOKED_AT goes.
    """
    mask, shape = subject.workload.visible_mask, subject.workload.mask_shape
    interval = mask.interval(shape)
    if interval is not None:
        low, high = (np.clip(edge, 0, shape.kv_len) for edge in interval)
        return (high > low).astype(np.float64)[:, :, None]
    b, h, q, _ = mask.indices(shape)
    own = np.clip(q + shape.kv_len - shape.q_len, 0, shape.kv_len - 1)
    seen = np.broadcast_to(mask.predicate(shape, np)(b, h, q, own), np.broadcast_shapes(b.shape, h.shape, q.shape))
    sees = np.where(seen[..., 0], 1.0, np.nan)
    per_row = shape.kv_len * sees.shape[0] * sees.shape[1]
    asked = np.flatnonzero(np.isnan(sees).any(axis=(0, 1)))
    few = max(ROWS_LOOKED_AT, PAIRS_LOOKED_AT // per_row)
    if len(asked) > few:
        asked = asked[np.linspace(0, len(asked) - 1, few).astype(int)]
    step = max(1, (1 << 24) // per_row)
    for rows in (asked[n : n + step] for n in range(0, len(asked), step)):
        sees[:, :, rows] = mask.array(shape, rows).any(axis=-1)
    return sees.transpose(0, 2, 1)


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
