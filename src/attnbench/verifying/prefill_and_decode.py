"""Is a sequence in two steps, all but the last token and then that one, what it is in one? A model that decodes needs
that, and a kernel that aligns a causal mask elsewhere than at the end fails it."""

from __future__ import annotations

from collections.abc import Callable

import array_api_compat
import msgspec
import numpy as np

from attnbench.frameworks import Inputs
from attnbench.masks import Causal
from attnbench.spec import Array, Call, Workload
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.tolerance import SLACK

Build = Callable[[Workload], Call | None]


def check(subject: Subject, good: Array, relative: float, build: Build) -> tuple[str, ...]:
    """What held; nothing for other masks, or where `build` has no call for one of the steps. `good` is the verified
    output on the first input set, `relative` its allowed error."""
    w = subject.workload
    if w.pass_ == "backward" or not isinstance(w.visible_mask, Causal) or w.q_len != w.kv_len or w.q_len < 2:
        return ()
    if w.visible_mask.align != "bottom-right":
        return ()
    first, last = w.q_len - 1, slice(w.q_len - 1, None)
    steps = {
        "prefill": (msgspec.structs.replace(w, q_len=first, kv_len=first, pass_="forward"), slice(first), slice(first)),
        "decode": (msgspec.structs.replace(w, q_len=1, pass_="forward"), last, slice(None)),
    }
    for name, (step, queries, keys) in steps.items():
        call = build(step)
        if call is None:
            return ()
        _require_same(subject, name, call, queries, keys, good, SLACK * relative)
    return ("prefill and decode give the whole",)


def _require_same(
    subject: Subject, name: str, call: Call, queries: slice, keys: slice, good: Array, bound: float
) -> None:
    fw, whole = subject.framework, subject.draws.inputs(subject.layout)[0]

    def cut(array: Array, tokens: slice) -> Array:
        part = array[:, tokens] if subject.layout == "bshd" else array[:, :, tokens]
        return array_api_compat.array_namespace(part).asarray(part, copy=True)

    inputs = Inputs(cut(whole.q, queries), cut(whole.k, keys), cut(whole.v, keys), cut(whole.dout, queries))
    (out,) = run(fw.programs(call, "forward", inputs).main, inputs)
    fw.wait(out)
    got, want = (fw.numpy(array).astype(np.float64) for array in (out, cut(good, queries)))
    if got.shape != want.shape:
        raise Wrong(f"{name} alone gives an output of shape {got.shape}, {want.shape} was asked for")
    off = float(np.linalg.norm(got - want)) / (float(np.linalg.norm(want)) or 1.0)
    if not off <= bound:
        raise Wrong(
            f"{name} alone gives another output than the whole sequence at once (off by {off:.1e}, {bound:.1e} allowed)"
        )
