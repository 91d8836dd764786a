"""The call that returns the LSE too is another call: is its output the verified one, and its LSE right, on every input
set, from every place, and after other values were written where its inputs lay?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import array_api_compat
import numpy as np

from attnbench.frameworks import Inputs
from attnbench.measuring import turned, whole
from attnbench.measuring.alike import apart, spot
from attnbench.measuring.draws import by_head
from attnbench.measuring.subject import Subject, Wrong, run
from attnbench.measuring.tolerance import FORWARD_FACTOR, LSE_FLOOR, SLACK, Compared, Limits, compare_lse
from attnbench.spec import Array, Call

Joined = Callable[[Inputs], Array]


def check(subject: Subject, good: Sequence[tuple[Array, ...]], limits: Limits) -> Compared | None:
    """Judge it, or None where there is none. `good` are the verified outputs of each input set."""
    if subject.lse is None or subject.declared_error is not None:  # of an approximate one, quality takes the recall
        return None
    sets = subject.draws.inputs(subject.layout)
    joined = _program(subject, subject.lse)
    found = [joined(inputs) for inputs in sets]
    for array, outputs in zip(found, good):
        _require_output(subject, array, outputs[0], limits)
    worst = max((_judged(subject, array, which) for which, array in enumerate(found)), key=lambda one: one.error)
    _check_counted(subject, joined)
    bound = SLACK * worst.allowed
    if (places := turned.draw_places(subject)) is not None:
        moved = Inputs(*(turned.moved(subject, x, name, places) for name, x in zip(("q", "k", "v", "out"), sets[0])))
        there = np.take(_lse(subject, found[0])[places.batch], places.heads, axis=subject.head_axis)
        _require_same(_lse(subject, joined(moved)), there, bound, "from other places")
    if subject.framework.overwrites:
        inputs = Inputs(*subject.framework.snapshot(tuple(sets[0])))
        joined(inputs)
        for array, values in zip(inputs, sets[1]):
            subject.framework.overwrite(array, values)
        again = _lse(subject, joined(inputs))
        _require_same(again, _lse(subject, found[1]), bound, "when other values lie where its inputs lay")
    return worst


def sampled(subject: Subject, array: Array) -> list[np.ndarray]:
    """LSE [g, rows] of each sampled head, of output and LSE side by side."""
    group, sample = subject.workload.group, subject.draws.sample
    heads = (slice(at[1] * group, (at[1] + 1) * group) for at in sample.heads)
    return [
        subject.head_rows(array[..., -1:], at[0], members, sample.rows)[..., 0]
        for at, members in zip(sample.heads, heads)
    ]


def on_first_set(subject: Subject, call: Call) -> list[np.ndarray]:
    """The same of a call that returns (out, lse), on the first input set."""
    return sampled(subject, _program(subject, call)(subject.draws.inputs(subject.layout)[0]))


def _program(subject: Subject, call: Call) -> Joined:
    """Inputs -> output and LSE side by side in one array, wide: [..., value_dim + 1] in the output's layout."""
    fw, w = subject.framework, subject.workload
    wide = "float64" if w.dtype == "float64" else "float32"

    def joined(q: Array, k: Array, v: Array) -> Array:
        out, lse = call(q, k, v)
        if tuple(lse.shape) != (w.batch, w.heads, w.q_len):
            raise Wrong(f"lse has shape {tuple(lse.shape)}, {(w.batch, w.heads, w.q_len)} was asked for")
        xp = array_api_compat.array_namespace(lse)
        last = xp.permute_dims(lse, (0, 2, 1)) if subject.layout == "bshd" else lse
        return xp.concat([fw.cast(out, wide), fw.cast(last[..., None], wide)], axis=-1)

    main = fw.programs(joined, "forward", subject.draws.inputs(subject.layout)[0]).main

    def once(inputs: Inputs) -> Array:
        (array,) = run(main, inputs)
        fw.wait(array)
        return fw.on_one_device(array)

    return once


def _require_output(subject: Subject, array: Array, good: Array, limits: Limits) -> None:
    fw, dtype = subject.framework, subject.workload.dtype
    out = fw.cast(array[..., :-1], dtype)
    if fw.same_bits(out, good):
        return
    if differs := apart(fw, out, good, limits, dtype):
        raise Wrong(
            f"the call that returns the LSE returns another output: {spot(differs, subject.layout)} differs by "
            f"{differs.share:.1e}, {differs.allowed:.1e} allowed"
        )


def _judged(subject: Subject, array: Array, which: int) -> Compared:
    truths = subject.draws.truths(which, gradients=False)
    result = compare_lse(sampled(subject, array), [t.lse for t in truths], [t.plain_lse for t in truths])
    if result.fault:
        raise Wrong(result.fault + (" (on the second input set only: a stored result?)" if which else ""))
    return result


def _check_counted(subject: Subject, joined: Joined) -> None:
    """Judge both on inputs of which every row, and its LSE, is known to a small share of one key's weight."""
    draws, w = subject.draws, subject.workload
    array = joined(draws.probe("counted", subject.layout))
    whole.require_counted(subject, array[..., :-1], "output of the call that returns the LSE")
    truths, rows = draws.truths("counted", False), draws.covered(False).rows
    exact = [truth.lse for truth in truths]
    rounding = FORWARD_FACTOR * compare_lse([truth.plain_lse for truth in truths], exact, exact).error
    for heads, truth in draws.whole("counted", False):
        mine = by_head(array[..., -1:], subject.layout, w.group, heads)
        got = subject.framework.numpy(mine)[:, :, rows, 0].astype(np.float64)
        right = truth.lse if isinstance(truth.lse, np.ndarray) else subject.framework.numpy(truth.lse)
        bound = rounding + LSE_FLOOR * (1 + float(np.abs(right[np.isfinite(right)]).max(initial=0)))
        _require_same(got, right.astype(np.float64), bound, "in some rows where all keys weigh alike")


def _lse(subject: Subject, array: Array) -> np.ndarray:
    """[b, t, h] or [b, h, t], as the layout is."""
    return subject.framework.numpy(array[..., -1]).astype(np.float64)


def _require_same(got: np.ndarray, want: np.ndarray, bound: float, how: str) -> None:
    """Everywhere: -inf in the same rows, the others near each other."""
    seen = np.isfinite(want)
    off = np.abs(np.where(seen, got, 0.0) - np.where(seen, want, 0.0)).max(initial=0.0)
    if not np.array_equal(np.isfinite(got), seen) or not off <= bound:
        raise Wrong(f"lse: another one {how} (off by {off:.2e}, {bound:.2e} allowed)")
