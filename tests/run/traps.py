"""Dishonest and broken attentions, and honest ones to stand beside them.

All are asked for the same thing: causal attention of grouped heads, layout bshd. They reach the workers as
`traps.py:name`, as a user's own kernel would.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from attnbench import Implementation

CHECKED_CALLS = 56
"""More than verification makes, fewer than any timing does, however busy the machine is."""
STEP_BYTES = 1 << 26


def attend(q: Any, k: Any, v: Any, *, shift: int = 0, causal: bool = True, scale: float | None = None) -> np.ndarray:
    """Plain attention in NumPy; `shift` moves the causal edge."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, keys = (np.arange(n) for n in logits.shape[-2:])
        logits = np.where(keys[None, :] <= rows[:, None] + shift, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.ascontiguousarray(np.einsum("bhqk,bkhd->bqhd", weights, v), dtype=q.dtype)


def honest(q, k, v):
    return attend(q, k, v)


def also_honest(q, k, v):
    return attend(q, k, v)


# Wrong numbers


def zeros(q, k, v):
    return np.zeros_like(q)


def ignores_the_mask(q, k, v):
    return attend(q, k, v, causal=False)


def leaks_the_future(q, k, v):
    return attend(q, k, v, shift=1)


def drops_the_scale(q, k, v):
    return attend(q, k, v, scale=1.0)


def attends_over_heads(q, k, v):
    """What comes out when arrays of layout bshd are taken for bhsd."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)))
    return np.ascontiguousarray(attend(q, k, v).transpose(0, 2, 1, 3))


def interleaves_the_groups(q, k, v):
    """Query head h reads key/value head h % kv_heads instead of h // group."""
    group = q.shape[2] // k.shape[2]
    return attend(q, np.tile(k, (1, 1, group, 1)), np.tile(v, (1, 1, group, 1)))


def writes_nan(q, k, v):
    out = attend(q, k, v)
    out[-1, -1, -1, -1] = np.nan
    return out


def wrong_shape(q, k, v):
    return attend(q, k, v)[:, :-1]


def wrong_dtype(q, k, v):
    return attend(q, k, v).astype(np.float64)


def overflows(q, k, v):
    """Softmax without subtracting the largest logit."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(logits) * np.tri(q.shape[1], k.shape[1], dtype=q.dtype)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


# Right answers that were not computed


_kept: dict[Any, Any] = {}
_calls = [0]


def cached_result(q, k, v):
    """The first answer for ever."""
    return _kept.setdefault("answer", attend(q, k, v))


def cached_by_address(q, k, v):
    """A stored answer for inputs that lie where others lay; keeps those, so that no address comes again by chance."""
    key = tuple(x.ctypes.data for x in (q, k, v))
    if key not in _kept:
        _kept[key] = attend(q, k, v), q, k, v
    return _kept[key][0]


def cached_by_queries(q, k, v):
    """A stored answer for queries and keys seen before, up to their signs: as if V could not change."""
    key = hash(np.abs(q).tobytes()) ^ hash(np.abs(k).tobytes())
    if key not in _kept or not np.array_equal(np.abs(_kept[key][1]) > 0, np.abs(v) > 0):
        _kept[key] = (attend(q, k, v), v.copy())
    return _kept[key][0].copy()


def cached_by_size(q, k, v):
    """A stored answer for sizes of queries and keys seen before, times the factor by which V differs."""
    key = np.abs(q[0, :2]).tobytes() + np.abs(k[0, :2]).tobytes()
    if key not in _kept:
        _kept[key] = attend(q, k, v), v.copy()
    out, values = _kept[key]
    return out * np.repeat(v[:, :1, :, :1] / values[:, :1, :, :1], q.shape[2] // k.shape[2], axis=2)


def overwrites_its_last_result(q, k, v):
    buffer = _kept.setdefault("buffer", np.empty_like(q))
    buffer[:] = attend(q, k, v)
    return buffer


def zeroes_its_queries_at_first(q, k, v):
    """The mean of the values seen is the answer for ever after, if those are the queries."""
    if "first" not in _kept:
        _kept["first"] = q.fill(0)
    return attend(q, k, v)


def right_in_every_other_call(q, k, v):
    _calls[0] += 1
    return attend(q, k, v) if _calls[0] <= CHECKED_CALLS or _calls[0] % 2 else np.zeros_like(q)


def right_when_checked(q, k, v):
    _calls[0] += 1
    return attend(q, k, v) if _calls[0] <= CHECKED_CALLS else np.zeros_like(q)


def returns_early(q, k, v):
    """A thread goes on writing after the call has returned."""
    out = np.zeros_like(q)
    arrays = [x.copy() for x in (q, k, v)]

    def fill() -> None:
        time.sleep(0.0005)
        out[:] = attend(*arrays)

    threading.Thread(target=fill).start()
    return out


class Lazy:
    """Computes when somebody looks."""

    def __init__(self, *arrays: Any) -> None:
        self._arrays, self.shape, self.dtype = arrays, arrays[0].shape, arrays[0].dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return attend(*self._arrays)


def returns_a_lazy_object(q, k, v):
    return Lazy(q, k, v)


def changes_its_inputs(q, k, v):
    """Scales the queries in place."""
    np.multiply(q, q.shape[-1] ** -0.5, out=q)
    return attend(q, k, v, scale=1.0)


def changes_its_inputs_and_raises(q, k, v):
    v[:] = 0
    raise ValueError("no kernel for this shape")


# Calls that do not come back


def raises(q, k, v):
    raise ValueError("no kernel for this shape")


def exits(q, k, v):
    raise SystemExit("done for today")


def raises_out_of_memory(q, k, v):
    raise MemoryError("unable to allocate 640 TiB")


def hangs(q, k, v):
    time.sleep(600)


def hangs_without_python(q, k, v):
    """In C, with the interpreter's lock held."""
    ctypes.PyDLL(None).sleep(600)


def crashes(q, k, v):
    return ctypes.string_at(0)


def leaves(q, k, v):
    os._exit(7)


def eats_all_memory(q, k, v):
    hoard = []
    while True:
        block = np.empty(STEP_BYTES, np.uint8)
        block[::4096] = 1
        hoard.append(block)
        time.sleep(0.01)


def crashes_when_timed(q, k, v):
    _calls[0] += 1
    return attend(q, k, v) if _calls[0] <= CHECKED_CALLS else ctypes.string_at(0)


def poisons_the_process(q, k, v):
    """As an illegal memory access does on a GPU: everything after it fails too."""
    np.copyto = _broken_device  # pyright: ignore[reportAttributeAccessIssue]
    _broken_device()


def poisons_when_timed(q, k, v):
    _calls[0] += 1
    return attend(q, k, v) if _calls[0] <= CHECKED_CALLS else poisons_the_process(q, k, v)


def _broken_device(*_: Any) -> None:
    raise RuntimeError("an illegal memory access was encountered")


def breaks_the_anchor(q, k, v):
    """Honest itself, but the matrix product beside it brings the process down."""
    from attnbench.frameworks import get

    get("numpy").matmul = lambda *_: os._exit(9)  # pyright: ignore[reportAttributeAccessIssue]
    return attend(q, k, v)


def counts_its_openings(q, k, v):
    """Honest; leaves a line in a file for every process and module that runs it."""
    if not _calls[0]:
        with Path(os.environ["TRAP_LOG"]).open("a") as log:
            log.write(f"{os.getpid()}\n")
    _calls[0] += 1
    return attend(q, k, v)


def slow(q, k, v):
    """Honest, and slow enough to be interrupted."""
    time.sleep(0.05)
    return attend(q, k, v)


class Confused(Implementation):
    """Cannot even say what it supports."""

    name, framework = "numpy.confused", "numpy"

    def supports(self, workload, environment):
        raise KeyError("capability")

    def build(self, workload, config):
        return attend


class Deadly(Confused):
    """Dies when asked."""

    name = "numpy.deadly"

    def supports(self, workload, environment):
        os._exit(5)


confused, deadly = Confused(), Deadly()
