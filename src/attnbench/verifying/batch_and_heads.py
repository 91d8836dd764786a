"""Is every batch row and every head as right as those that were compared? The same numbers in other places must give
the same results there; a whole output is looked at, where the reference can only afford a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import array_api_compat
import numpy as np

from attnbench.frameworks import Inputs
from attnbench.spec import Array
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.tolerance import SLACK

SMALL = 1e-3
"""Of a typical head's size: less than that is compared with it instead."""
LONG_NAMES = {"out": "the output", "dq": "the gradient of Q", "dk": "the gradient of K", "dv": "the gradient of V"}


class Places(NamedTuple):
    """Where batch rows, query heads and key/value heads come from."""

    batch: np.ndarray
    heads: np.ndarray
    kv_heads: np.ndarray

    def of(self, name: str) -> np.ndarray:
        """The heads of an array: q, out and their gradients have all, k and v the shared ones."""
        return self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads


def check(subject: Subject, good: Mapping[str, Array], allowed: Mapping[str, float]) -> tuple[str, ...]:
    """What was turned. `good` are the outputs on the first input set, `allowed` their relative errors."""
    places = draw_places(subject)
    if places is None:
        return ()
    first = subject.draws.inputs(subject.layout)[0]
    turned = Inputs(*(moved(subject, x, name, places) for name, x in zip(("q", "k", "v", "out"), first)))
    outputs = run(subject.programs.main, turned)
    subject.framework.wait(outputs)
    for (name, before), after in zip(good.items(), outputs):
        _require_alike(subject, name, moved(subject, before, name, places), after, SLACK * allowed[name], places)
    batch, heads = (_others(order) for order in (places.batch, places.heads))
    return (*(("permuted batch",) if batch else ()), *(("permuted heads",) if heads else ()))


def draw_places(subject: Subject) -> Places | None:
    """Where everything comes from when it is moved; None where nothing may be."""
    w = subject.workload
    rng = np.random.default_rng(subject.draws.seed)
    batch = 0 if w.batch == 1 or w.visible_mask.per_batch else int(rng.integers(1, w.batch))
    alike = w.kv_heads > 1 and not w.visible_mask.per_head and subject.declared_error is None
    heads = int(rng.integers(1, w.kv_heads)) if alike else 0
    if not batch and not heads:
        return None
    grouped = np.arange(w.heads).reshape(w.kv_heads, w.group)
    return Places(
        np.roll(np.arange(w.batch), batch),
        np.roll(grouped, heads, axis=0).ravel(),
        np.roll(np.arange(w.kv_heads), heads),
    )


def _others(order: np.ndarray) -> bool:
    return not np.array_equal(order, np.arange(len(order)))


def moved(subject: Subject, array: Array, name: str, places: Places) -> Array:
    """Batch rows and heads of an input or output, taken from these places."""
    for order, axis in ((places.batch, 0), (places.of(name), subject.head_axis)):
        if _others(order):
            index = subject.framework.namespace(subject.device).asarray(order)
            array = array_api_compat.array_namespace(array).take(array, index, axis=axis)
    return array


def _require_alike(subject: Subject, name: str, want: Array, got: Array, bound: float, places: Places) -> None:
    fw = subject.framework
    if fw.same_bits(want, got):
        return
    wide = "float64" if subject.workload.dtype == "float64" else "float32"
    want, got = fw.cast(want, wide), fw.cast(got, wide)
    apart, size = head_norms(subject, got - want), head_norms(subject, want)
    size = np.maximum(size, SMALL * np.median(size))
    off = apart > bound * size
    if not off.any():
        return
    batch, head = (int(place) for place in np.argwhere(off)[0])
    share = apart[batch, head] / size[batch, head] if size[batch, head] else float("inf")
    raise Wrong(
        f"{LONG_NAMES[name]} depends on its place: batch {places.batch[batch]}, head {places.of(name)[head]} moved to "
        f"batch {batch}, head {head} gives another result (off by {share:.1e}, {bound:.1e} allowed)"
    )


def head_norms(subject: Subject, array: Array) -> np.ndarray:
    """Return the norm of each head of each batch row of an output, [batch, heads]."""
    tokens = 1 if subject.head_axis == 2 else 2
    xp = array_api_compat.array_namespace(array)
    return np.sqrt(subject.framework.numpy(xp.sum(array * array, axis=(tokens, 3))).astype(np.float64))
