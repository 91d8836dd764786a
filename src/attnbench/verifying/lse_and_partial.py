"""Checks of the call that returns the LSE too, and of the partial form, of which attention over parts of a whole is
built; and the quality of sparse attention, which LSEs tell.

The call with the LSE is another call: its output must be the verified one, and its LSE right on every input set, for
large logits of either sign, at other places, and after other values were written where its inputs lay; so must its
gradient if there is one. The output and LSE of the partial form are compared with the truth, and its gradients if
output and LSE are those of a larger whole.

Sparse attention is compared with dense attention in two cases. A mask with a `blocks` part defines what is dropped: it
is compared with the same mask without that part, on the sampled rows, in float64. An approximate implementation that
selects keys reports its selection, and exp(its LSE - the true one) is the share of a row's attention mass that the kept
keys have, the recall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import array_api_compat
import numpy as np

from attnbench import reference
from attnbench.frameworks import Inputs
from attnbench.masks.cuts import block_layout
from attnbench.spec import DTYPE_BYTES, Array, Call, Config, Errors, Implementation, Workload
from attnbench.verifying import probes
from attnbench.verifying.draws import SCALED, by_head
from attnbench.verifying.invariants import draw_places, moved_inputs, on_overwritten_inputs
from attnbench.verifying.scales import COMPARED, require_right
from attnbench.verifying.subject import Examination, Subject, Wrong, run
from attnbench.verifying.tolerance import (
    FORWARD_FACTOR,
    LSE_FLOOR,
    SLACK,
    Compared,
    Limits,
    apart,
    compare_large_lse,
    compare_lse,
    relative_error,
    spot,
)
from attnbench.verifying.whole_output import require_counted

GRADIENT_PAIRS, GRADIENT_OFF = 1 << 24, {2: 0.05, 4: 1e-3, 8: 1e-3}
"""Most pairs of a query and a key in a head whose gradients of the LSE are computed, and the error they may have by
bytes of an element: a missing gradient, or one of another base, is off by a third at least."""
Joined = Callable[[Inputs], Array]


def check_lse(examination: Examination) -> tuple[str, ...]:
    """Check the LSE and note its error; return no property.

    Nothing is checked if there is no LSE, or for an approximate implementation, of whose LSE `quality_of` takes the
    recall.
    """
    subject, good = examination.subject, examination.found.good
    if subject.lse is None or subject.declared_error is not None:
        return ()
    limits = examination.found.limits("out", subject.workload.dtype)
    joined = _program(subject, subject.lse)
    arrays = [joined(inputs) for inputs in subject.inputs]
    for array, outputs in zip(arrays, good):
        _require_output(subject, array, outputs[0], limits)
    compared: list[Compared] = []
    for which, array in enumerate(arrays):
        truths = subject.draws.truths(which, gradients=False)
        compared.append(compare_lse(sampled(subject, array), [t.lse for t in truths], [t.plain_lse for t in truths]))
        if fault := compared[-1].fault:
            raise Wrong(fault + (" (on the second input set only: a stored result?)" if which else ""))
    worst = max(compared, key=lambda result: result.error)
    _check_counted(subject, joined)
    _check_large(subject, joined)
    _check_steep(subject, joined)
    if subject.lse_gradient and subject.workload.needs_gradients:
        _check_gradient(subject, subject.lse)
    if subject.workload.needs_gradients and (examination.thorough or not subject.framework.compiles):
        _check_output_gradient(examination, subject.lse)
    bound = SLACK * worst.allowed
    if (places := draw_places(subject)) is not None:
        elsewhere = _lse(subject, joined(moved_inputs(subject, places)))
        there = np.take(_lse(subject, arrays[0])[places.batch], places.heads, axis=subject.head_axis)
        _require_same(elsewhere, there, bound, "from other places")
    if subject.framework.overwrites:
        again = _lse(subject, on_overwritten_inputs(subject, joined))
        _require_same(again, _lse(subject, arrays[1]), bound, "after its inputs were overwritten in place")
    examination.noted["lse"] = worst.error
    return ()


def sampled(subject: Subject, array: Array) -> list[np.ndarray]:
    """Return the LSE [g, rows] of each sampled head from an array with output and LSE side by side."""
    return [rows[..., 0] for rows in subject.sampled("out", array[..., -1:])]


def _joined(subject: Subject, call: Call) -> Call:
    """Return a call that gives output and LSE side by side in one wide array, [..., value_dim + 1] in its layout."""
    fw, w = subject.framework, subject.workload

    def joined(q: Array, k: Array, v: Array) -> Array:
        out, lse = call(q, k, v)
        if tuple(lse.shape) != (w.batch, w.heads, w.q_len):
            raise Wrong(f"lse has shape {tuple(lse.shape)}, expected {(w.batch, w.heads, w.q_len)}")
        xp = array_api_compat.array_namespace(lse)
        last = xp.permute_dims(lse, (0, 2, 1)) if subject.layout == "bshd" else lse
        return xp.concat([fw.cast(out, subject.wide), fw.cast(last[..., None], subject.wide)], axis=-1)

    return joined


def _program(subject: Subject, call: Call) -> Joined:
    """Compile a call that returns (out, lse) and return a function of inputs that gives both side by side."""
    fw = subject.framework
    main = fw.programs(_joined(subject, call), "forward", subject.inputs[0]).main

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
            f"the call that returns the LSE returns a different output: {spot(differs, subject.layout)} differs by "
            f"{differs.share:.1e}, {differs.allowed:.1e} allowed"
        )


def _check_counted(subject: Subject, joined: Joined) -> None:
    """Check output and LSE on inputs of which every row is known to a small share of one key's weight."""
    array = joined(subject.draws.probe("counted", subject.layout))
    require_counted(subject, array[..., :-1], "output of the call that returns the LSE (keys counted)")
    truths = subject.draws.truths("counted", False)
    exact = [truth.lse for truth in truths]
    rounding = FORWARD_FACTOR * compare_lse([truth.plain_lse for truth in truths], exact, exact).error
    for got, right in _whole_lse(subject, array, "counted"):
        bound = rounding + LSE_FLOOR * (1 + float(np.abs(right[np.isfinite(right)]).max(initial=0)))
        _require_same(got, right, bound, "in some rows where all keys weigh alike")


def _whole_lse(subject: Subject, array: Array, probe: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the LSE [heads, members, rows] of the covered heads in a result on a probe, and the right one."""
    rows = subject.draws.covered(False).rows
    for heads, truth in subject.draws.whole(probe, False):
        yield subject.host(subject.heads("out", array[..., -1:], heads)[:, :, rows, 0]), subject.host(truth.lse)


def _check_large(subject: Subject, joined: Joined) -> None:
    """Check output and LSE on inputs ten and a hundred times as large, and the LSE on queries that point at edges."""
    draws, w = subject.draws, subject.workload
    for scale in COMPARED:
        inputs = draws.probe(name := f"{SCALED}{scale:g}", subject.layout)
        if all(subject.framework.is_finite(x) for x in inputs):
            array = joined(inputs)
            _require_large(subject, array, name, f"inputs scaled by {scale:g}")
            require_right(subject, scale, {"out": subject.framework.cast(array[..., :-1], w.dtype)})
    if w.pass_ == "forward":
        _require_large(
            subject, joined(draws.probe("pointed", subject.layout)), "pointed", "queries that point at edges"
        )


def _require_large(subject: Subject, array: Array, which: str, words: str) -> None:
    truths, (_, sizes) = subject.draws.truths(which, False), subject.draws.logit_gaps(which)
    got, exact, plain = (
        np.stack(x) for x in (sampled(subject, array), [t.lse for t in truths], [t.plain_lse for t in truths])
    )
    most = np.inf if subject.workload.softcap is None else subject.workload.softcap
    result = compare_large_lse(got, exact, plain, sizes, subject.workload.dtype, most)
    if result.fault:
        raise Wrong(f"{result.fault} ({words})")


def _check_steep(subject: Subject, joined: Joined) -> None:
    """Check output and LSE if all logits lie far below 0."""
    if not probes.can_be_steep(subject.workload):
        return
    array = joined(subject.draws.probe("steep", subject.layout))
    what = "output of the call that returns the LSE (all logits far below 0)"
    require_counted(subject, array[..., :-1], what, "steep")
    for got, right in _whole_lse(subject, array, "steep"):
        result = compare_large_lse(got, right, right, np.abs(right), subject.workload.dtype)
        if result.fault:
            raise Wrong(f"{result.fault} (all logits far below 0)")


def _check_output_gradient(examination: Examination, call: Call) -> None:
    """Compare the gradients of the output of the call that returns the LSE with those of the call without it.

    A call that refuses gradients passes.
    """
    subject, fw = examination.subject, examination.subject.framework
    inputs = subject.inputs[0]
    xp = array_api_compat.array_namespace(inputs.dout)
    dout = fw.cast(xp.concat([inputs.dout, 0 * inputs.dout[..., :1]], axis=-1), subject.wide)
    inputs = inputs._replace(dout=dout)
    try:
        found = run(fw.programs(_joined(subject, call), "backward", inputs).main, inputs)
    except Wrong:
        raise
    except Exception:
        return
    fw.wait(found)
    for name, got in zip(("dq", "dk", "dv"), found):
        good, limits = examination.outputs[name], examination.limits[name]
        if differs := apart(fw, got, good, limits, subject.workload.dtype):
            raise Wrong(
                f"the call that returns the LSE gives another {name}: {spot(differs, subject.layout)} differs by "
                f"{differs.share:.1e}, {differs.allowed:.1e} allowed"
            )


def _check_gradient(subject: Subject, call: Call) -> None:
    """Compare the gradients of a weighted sum of the LSE with the truth, in one head.

    Nothing is checked if there is a soft cap, or if a head is too large.
    """
    draws, w, fw = subject.draws, subject.workload, subject.framework
    if w.softcap is not None or not draws.gradient_heads or w.q_len * w.kv_len * w.group > GRADIENT_PAIRS:
        return
    rng = np.random.default_rng([draws.seed, 17])
    weights = rng.standard_normal((w.batch, w.q_len, w.heads), np.float32)
    last = fw.array(weights[..., None], subject.wide, subject.device)
    xp = array_api_compat.array_namespace(last)
    nothing = xp.broadcast_to(0 * last, (*weights.shape, w.value_dim))
    dout = fw.transpose(xp.concat([nothing, last], axis=-1), "bshd", subject.layout)
    inputs = subject.inputs[0]._replace(dout=dout)
    outputs = run(fw.programs(_joined(subject, call), "backward", inputs).main, inputs)
    fw.wait(outputs)
    batch, index = at = draws.gradient_heads[int(rng.integers(len(draws.gradient_heads)))]
    own = weights[batch, :, subject.members("dq", at)].T[..., None]
    exact = _gradients_of_lse(w, _head_of(subject, at)[0], own)
    for name, array, right in zip(("dq", "dk"), outputs, exact):
        got = subject.host(subject.heads(name, array, (at,)))[0]
        off = float(np.linalg.norm(got - right) / (np.linalg.norm(right) or 1.0))
        if not off <= (allowed := GRADIENT_OFF[DTYPE_BYTES[w.dtype]]):
            raise Wrong(f"lse: its gradient {name} is off by {off:.1e}, {allowed:.1e} allowed (head {index})")


def _gradients_of_lse(w: Workload, head: reference.Head, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return dq and dk [heads, tokens, width] of the sum of a head's LSE times weights [g, q_len, 1].

    dS is P times the weights, so that dQ is an attention over K, and dK has the form of dV.
    """
    keys, rows, weights = head._replace(v=head.k), np.arange(w.q_len), w.softmax_scale * weights
    dq = weights * reference.forward_rows(w, keys, rows, np, np.float64).out
    return dq, reference.backward_rows(w, keys, weights * head.q, rows, np, np.float64).dv[None]


def _head_of(subject: Subject, at: tuple[int, int]) -> tuple[reference.Head, np.ndarray]:
    """Return a head of the first input set and its dO, in float64."""
    group, inputs = subject.workload.group, subject.draws.input_set(0)
    q, k, v, dout = (subject.host(by_head(x, "bshd", n, (at,)))[0] for x, n in zip(inputs, (group, 1, 1, group)))
    return reference.Head(q, k[0], v[0], *at), dout


def _lse(subject: Subject, array: Array) -> np.ndarray:
    """Return the LSE as float64, [b, t, h] or [b, h, t] by the layout."""
    return subject.host(array[..., -1])


def _require_same(got: np.ndarray, want: np.ndarray, bound: float, how: str) -> None:
    """Require -inf in the same rows and values near each other in the others."""
    seen = np.isfinite(want)
    off = np.abs(np.where(seen, got, 0.0) - np.where(seen, want, 0.0)).max(initial=0.0)
    if not np.array_equal(np.isfinite(got), seen) or not off <= bound:
        raise Wrong(f"lse: changes {how} (off by {off:.2e}, {bound:.2e} allowed)")


LEAST_SHARE = 0.2
"""Least share of a row's weight in the whole that lies in the part."""


def check_partial_form(examination: Examination) -> tuple[str, ...]:
    """Check the partial form in one head and return the property.

    Nothing is checked if there is no partial form, if there is a soft cap, or if a head is too large.
    """
    subject = examination.subject
    w, draws, fw = subject.workload, subject.draws, subject.framework
    partial = None if examination.partial is None else examination.partial()
    if partial is None or w.softcap is not None or w.q_len * w.kv_len * w.group > GRADIENT_PAIRS:
        return ()
    (forward, backward), (q, k, v, dout) = partial, draws.inputs("bshd")[0]
    relative = examination.found.limits("out", w.dtype).relative
    rng = np.random.default_rng([draws.seed, 18])
    batch, index = at = draws.sample.heads[int(rng.integers(len(draws.sample.heads)))]
    members, rows = subject.members("out", at), np.arange(w.q_len)
    head, dout1 = _head_of(subject, at)
    right = reference.forward_rows(w, head, rows, np, np.float64)
    out, lse = forward(q, k, v)
    mine, mine_lse = (subject.host(x) for x in (out, lse))
    off = relative_error([mine[batch, :, members].transpose(1, 0, 2)], [right.out])
    if not off <= SLACK * relative:
        raise Wrong(f"its partial form: out is off by {off:.1e}, {SLACK * relative:.1e} allowed (head {index})")
    plain = reference.forward_rows(w, head._replace(q=head.q.astype("f4"), k=head.k.astype("f4")), rows, np, np.float32)
    # Plain arithmetic on one head errs little, so that twice its error is too little for a right kernel of 16 bits.
    found = compare_lse([mine_lse[batch, members]], [right.lse], [plain.lse])
    if not found.error <= SLACK * found.allowed:
        raise Wrong(
            f"its partial form: lse: off by {found.error:.1e}, {SLACK * found.allowed:.1e} allowed (head {index})"
        )
    if not w.needs_gradients:
        return ("partial form",)
    # The rest of the whole: keys elsewhere, of which only their weight and their mean value are known.
    share = rng.uniform(LEAST_SHARE, 1.0, lse.shape).astype(np.float32)
    mean = rng.standard_normal(mine.shape).astype(np.float32)
    own = share.transpose(0, 2, 1)[..., None]
    sees = np.isfinite(mine_lse).transpose(0, 2, 1)[..., None]
    out = fw.array(np.where(sees, own * mine + (1 - own) * mean, 0.0), w.dtype, subject.device)
    lse = fw.array(mine_lse - np.log(share), str(lse.dtype).rpartition(".")[2], subject.device)
    gradients = [subject.host(x) for x in backward(q, k, v, out, lse, dout)]
    whole = subject.host(out)[batch, :, members].transpose(1, 0, 2)
    lives = np.isfinite(right.lse)
    ratio = np.where(lives, np.exp(np.where(lives, right.lse - fw.numpy(lse)[batch, members], 0.0)), 0.0)[..., None]
    exact = _gradients(subject, head, dout1, whole, ratio)
    for name, array, want in zip(("dq", "dk", "dv"), gradients, exact):
        off = relative_error([array[batch, :, subject.members(name, at)].transpose(1, 0, 2)], [want])
        if not off <= (allowed := GRADIENT_OFF[DTYPE_BYTES[w.dtype]]):
            raise Wrong(f"its partial form with a larger whole: {name} is off by {off:.1e}, {allowed:.1e} allowed")
    return ("partial form",)


def _gradients(
    subject: Subject, head: reference.Head, dout: np.ndarray, whole: np.ndarray, ratio: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dv of a head [heads, tokens, width] as the part of a whole, whose output is `whole`.

    `ratio` is the part's share of the whole's weights: dS is P (dO V - dO out). By linearity these are the gradients of
    the part alone with dO times its share, and those of an LSE whose gradient is the difference of the products dO out.
    """
    w, rows = subject.workload, np.arange(subject.workload.q_len)
    own = reference.forward_rows(w, head, rows, np, np.float64).out
    part = reference.backward_rows(w, head, dout * ratio, rows, np, np.float64)
    dq, dk = _gradients_of_lse(w, head, ratio * ((own - whole) * dout).sum(-1, keepdims=True))
    return part.dq + dq, part.dk[None] + dk, part.dv[None]


def quality_of(subject: Subject, implementation: Implementation, config: Config, errors: Errors) -> dict[str, float]:
    """Return sparsity, recall of attention mass and error of the output by name; nothing if no block or key is dropped.

    Only what an approximate implementation reports of its selection is believed, if it can be. Raises Wrong below a
    declared recall.
    """
    if subject.workload.pass_ == "backward":
        return {}
    chosen = implementation.quality(subject.workload, config) if implementation.approximate else None
    if chosen is None:
        if (dense := subject.draws.without_blocks) is None:
            return {}
        layout = block_layout(subject.workload.visible_mask, subject.workload.mask_shape)
        sparsity = {} if layout is None else {"sparsity": layout.sparsity}
        kept, whole = subject.draws.truths(0, gradients=False), dense.truths(0, gradients=False)
        recall = _recall([truth.lse for truth in kept], [truth.lse for truth in whole])
        error = relative_error([truth.out for truth in kept], [truth.out for truth in whole])
        return {**sparsity, "recall": recall, "output_error": error}
    told = chosen(*subject.inputs[0][:3])
    figures = {name: float(told[name]) for name in ("sparsity", "work") if name in told}
    for name, value in figures.items():
        if not (0 < value <= 1 if name == "work" else 0 <= value <= 1):
            raise Wrong(f"reports {name} {value:g}, which must be a share of the pairs, at most 1")
    if errors.forward is not None:
        figures["output_error"] = errors.forward
    if subject.lse is not None:
        truths = subject.draws.truths(0, gradients=False)
        mine = sampled(subject, _program(subject, subject.lse)(subject.inputs[0]))
        figures["recall"] = _recall(mine, [truth.lse for truth in truths])
    least = implementation.declared_recall
    if least is not None and "recall" not in figures:
        raise Wrong(f"declares a recall of {least:.3f}, but returns no LSE to measure it by")
    if least is not None and not figures.get("recall", 0.0) >= least:
        raise Wrong(f"recall of attention mass {figures.get('recall', 0.0):.3f} is less than the declared {least:.3f}")
    return figures


def _recall(kept: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> float:
    """Return the mean share of attention mass that is kept, over rows that see a key in the whole."""
    part, everything = (np.concatenate([lse.ravel() for lse in lses]) for lses in (kept, whole))
    seen = np.isfinite(everything)
    return float(np.exp(part[seen] - everything[seen]).mean()) if seen.any() else 1.0
