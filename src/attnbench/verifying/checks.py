"""Is it right? Everything a call must pass before it may be timed.

A subject is one built call with its compiled programs; `examine` returns what it saw, or raises Wrong with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from attnbench.frameworks import OUTPUTS, Inputs
from attnbench.spec import Array, Errors, VerifiedAt, Workload
from attnbench.verifying import probes, whole_output
from attnbench.verifying.error_location import Compass, describe
from attnbench.verifying.invariants import check_overwritten_inputs, check_places, check_properties, hidden_nan
from attnbench.verifying.lse_and_partial import check_lse
from attnbench.verifying.scales import check_magnitudes, check_scale_and_softcap
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.tolerance import BACKWARD_FACTOR, FORWARD_FACTOR, Compared, Limits, compare

SETTLE_S = 0.004
"""How long an output is watched for changes after its call has returned."""
UNLIKE = 4
"""An error of so many times the allowed one belongs to another result, not to a worse one."""


@dataclass(frozen=True)
class Findings:
    """What a right subject showed. `good` are its outputs on each input set, for checks between timings."""

    errors: Errors
    verified_at: VerifiedAt
    deterministic: bool
    good: list[tuple[Array, ...]]
    forward: Limits | None
    backward: Mapping[str, Limits] | None
    """What the output and each gradient were allowed; None when they were not compared."""

    def limits(self, name: str, dtype: str) -> Limits:
        """Of an output; gradients that were too large to compare are held to what the output's error lets them be."""
        known = (self.backward or {}).get(name) if name.startswith("d") else self.forward
        if known is not None:
            return known
        return Limits.of_rounding(dtype) if self.forward is None else self.forward.widened(BACKWARD_FACTOR)


def examine(subject: Subject, thorough: bool) -> Findings:
    """All checks in order of cost; raises Wrong at the first that fails."""
    found = examine_again(subject)
    dtype, names = subject.workload.dtype, OUTPUTS[subject.workload.pass_]
    limits = {name: found.limits(name, dtype) for name in names}
    written = check_overwritten_inputs(subject, found.good[1], limits)
    moved = _check_places(subject, found)
    probed = _check_probes(subject, found)
    lse_found = check_lse(subject, found.good, found.limits("out", dtype))
    scales, powers = check_magnitudes(subject, _named(subject.workload, found.good[0]), limits, thorough)
    held = (*check_properties(subject, thorough), *moved, *written, *probed, *([powers] if powers else []))
    errors = msgspec.structs.replace(
        found.errors,
        lse=lse_found and lse_found.error,
        stability=scales,
        properties=held,
        hidden_nan=hidden_nan(subject),
    )
    return replace(found, errors=errors)


def examine_again(subject: Subject) -> Findings:
    """In another process of what was examined before: are its outputs right here too?"""
    good, forward, gradients = _check_outputs(subject)
    backward = max(gradients.values(), key=lambda one: one.error, default=None)
    main = forward or backward
    errors = Errors(
        forward=forward and forward.error,
        backward=backward and backward.error,
        forward_allowed=forward and forward.allowed,
        backward_allowed=backward and backward.allowed,
        max_abs=main and main.max_abs,
    )
    limits = {name: one.limits for name, one in gradients.items() if one.limits is not None}
    repeats = _repeats(subject, good[0])
    return Findings(errors, _verified_at(subject), repeats, good, forward and forward.limits, limits or None)


def examine_after(subject: Subject) -> None:
    """Check again, when a cell has been timed, what shows a path that is coarser than the verified one or another: its
    outputs, keys and pairs counted, scale and soft cap. The truths are those of the first examination."""
    good, *_ = _check_outputs(subject)
    if subject.declared_error is not None:
        return
    whole_output.check_counted(subject)
    whole_output.check_counted_pairs(subject)
    first = _named(subject.workload, good[0]).items()
    check_scale_and_softcap(subject, {name: _sampled(subject, name, array) for name, array in first}, _sampled)


def _check_outputs(subject: Subject) -> tuple[list[tuple[Array, ...]], Compared | None, dict[str, Compared]]:
    """What it returned for each input set, its forward and each of its gradients compared with the truth."""
    good = [_honest_call(subject, inputs) for inputs in subject.draws.inputs(subject.layout)]
    outputs = [_named(subject.workload, arrays) for arrays in good]
    forward = _check_forward(subject, outputs) if "out" in outputs[0] else None
    backward = _check_backward(subject, outputs) if subject.workload.needs_gradients else {}
    return good, forward, backward


def _honest_call(subject: Subject, inputs: Inputs) -> tuple[Array, ...]:
    """One call that must return the right kind of arrays, finished, with its inputs untouched."""
    fw, w = subject.framework, subject.workload
    before = fw.snapshot(tuple(inputs))
    output = run(subject.programs.main, inputs)
    for array in output:
        if not fw.owns(array):
            raise Wrong(f"returned {type(array).__module__}.{type(array).__name__}, not a plain {fw.name} array")
    at_once = fw.snapshot(output)
    fw.wait(output)
    time.sleep(SETTLE_S)
    names = tuple(_named(w, output))
    for name, early, late, shape in zip(names, at_once, output, _shapes(subject, names)):
        if tuple(late.shape) != shape:
            raise Wrong(f"{name} has shape {tuple(late.shape)}, {shape} was asked for")
        if not fw.is_finite(late):
            raise Wrong(f"{name} holds NaN or infinite values, where the reference is finite")
        if not fw.same_bits(early, late):
            raise Wrong(f"returned before its work was done: {name} changed after the call")
        kind = str(late.dtype).rpartition(".")[2]
        if kind != w.dtype:
            raise Wrong(f"{name} is {kind}, the inputs are {w.dtype}")
    if not all(fw.same_bits(old, new) for old, new in zip(before, inputs)):
        raise Wrong("changed its inputs")
    return at_once


def _named(workload: Workload, arrays: tuple[Array, ...]) -> dict[str, Array]:
    names = OUTPUTS[workload.pass_]
    if len(arrays) != len(names):
        raise Wrong(f"returned {len(arrays)} arrays, {len(names)} were asked for ({', '.join(names)})")
    return dict(zip(names, arrays))


def _shapes(subject: Subject, names: tuple[str, ...]) -> list[tuple[int, ...]]:
    w = subject.workload
    q, kv = (w.q_len, w.heads), (w.kv_len, w.kv_heads)
    sizes = {"out": (*q, w.value_dim), "dq": (*q, w.head_dim), "dk": (*kv, w.head_dim), "dv": (*kv, w.value_dim)}
    swap = subject.layout == "bhsd"
    ordered = {name: (h, t, d) if swap else (t, h, d) for name, (t, h, d) in sizes.items()}
    return [(w.batch, *ordered[name]) for name in names]


def _groups(subject: Subject, at: tuple[int, int]) -> tuple[slice, slice]:
    group = subject.workload.group
    return slice(at[1] * group, (at[1] + 1) * group), slice(at[1], at[1] + 1)


def _check_forward(subject: Subject, outputs: list[dict[str, Any]]) -> Compared:
    sample, worst = subject.draws.sample, None
    for which, named in enumerate(outputs):
        truths = subject.draws.truths(which, gradients=False)
        got = _sampled(subject, "out", named["out"])
        result = compare(
            "output", got, [t.out for t in truths], [t.plain_out for t in truths],
            subject.workload.dtype, FORWARD_FACTOR, subject.declared_error, summed=subject.summed,
            typical=0.0 if subject.workload.inputs == "sincostan" else subject.workload.kv_len**-0.5,
        )  # fmt: skip
        _require(
            result, which, got, [t.out for t in truths], Compass(sample.heads, sample.rows, subject.workload.group)
        )
        worst = result.worse(worst)
    assert worst is not None
    return worst


def _check_backward(subject: Subject, outputs: list[dict[str, Any]]) -> dict[str, Compared]:
    """dq, dk and dv of whole heads at this shape; none when not one fits the budget (a smaller shape is used then)."""
    heads, worst = subject.draws.gradient_heads, dict[str, Compared]()
    for which, named in enumerate(outputs):
        truths = subject.draws.truths(which, gradients=True) if heads else []
        for n, name in enumerate(("dq", "dk", "dv")):
            if not heads:
                continue
            got = _sampled(subject, name, named[name])
            exact = [_grads(t.grads, n) for t in truths]
            plain = [_grads(t.plain_grads, n) for t in truths]
            what = f"gradient of {name[1].upper()}"
            terms = [t.cancelling_grads[n] for t in truths if n < 2 and t.cancelling_grads is not None] or None
            result = compare(
                what, got, exact, plain, subject.workload.dtype, BACKWARD_FACTOR, subject.declared_error, terms,
                subject.summed,
            )  # fmt: skip
            members = subject.workload.group if n == 0 else 1
            _require(result, which, got, exact, Compass(heads, np.arange(exact[0].shape[1]), members))
            worst[name] = result.worse(worst.get(name))
    return worst


def _grads(grads: tuple[np.ndarray, ...] | None, n: int) -> np.ndarray:
    assert grads is not None
    return grads[n] if n == 0 else grads[n][None]


def _require(
    result: Compared,
    which: int,
    got: Sequence[np.ndarray] = (),
    exact: Sequence[np.ndarray] = (),
    compass: Compass | None = None,
) -> None:
    if not result.fault:
        return
    where, detail = "", ""
    if compass is not None and result.first_row is not None:
        batch, head = compass.head(result.first_row)
        kind = "key/value head" if result.fault.startswith(("gradient of K", "gradient of V")) else "head"
        where = f", first at batch {batch}, {kind} {head}, row {compass.row(result.first_row)}"
        if result.bad is not None:
            detail = describe(got, exact, result.bad, result.first_row, compass)
    stored = which and result.error > UNLIKE * result.allowed
    stale = " (on the second input set only: a stored result?)" if stored else ""
    errors = Errors(forward=result.error, forward_allowed=result.allowed, max_abs=result.max_abs)
    raise Wrong(result.fault + where + stale, errors, detail)


def _check_places(subject: Subject, found: Findings) -> tuple[str, ...]:
    named, dtype = _named(subject.workload, found.good[0]), subject.workload.dtype
    return check_places(subject, named, {name: found.limits(name, dtype).relative for name in named})


def _repeats(subject: Subject, first: tuple[Array, ...]) -> bool:
    again = run(subject.programs.main, subject.draws.inputs(subject.layout)[0])
    subject.framework.wait(again)
    return all(subject.framework.same_bits(a, b) for a, b in zip(first, again))


def _check_probes(subject: Subject, found: Findings) -> tuple[str, ...]:
    """Whole outputs, inputs made to show a wrong kernel, and the parameters: what samples and norms may miss. An error
    that was declared is not looked into."""
    if subject.declared_error is not None:
        return ()
    dtype, good = subject.workload.dtype, _named(subject.workload, found.good[0])
    whole_output.check_first(subject, good, {name: found.limits(name, dtype) for name in good})
    held = (
        *whole_output.check_counted(subject),
        *whole_output.check_steep(subject),
        *whole_output.check_counted_pairs(subject),
        *whole_output.check_pointed(subject),
    )
    if subject.workload.pass_ == "forward":
        _check_pointed_rows(subject)
    check_scale_and_softcap(subject, {name: _sampled(subject, name, array) for name, array in good.items()}, _sampled)
    return held


def _sampled(subject: Subject, name: str, array: Array) -> list[np.ndarray]:
    """[members, rows, width] of each head whose truth is known in float64."""
    sample, draws = subject.draws.sample, subject.draws
    if name == "out":
        return [subject.head_rows(array, at[0], _groups(subject, at)[0], sample.rows) for at in sample.heads]
    part = 0 if name == "dq" else 1
    return [subject.head_rows(array, at[0], _groups(subject, at)[part], None) for at in draws.gradient_heads]


def _check_pointed_rows(subject: Subject) -> None:
    """Sampled rows where logits are far from 0 and few keys take all the weight, so that none may be clamped."""
    sample, draws = subject.draws.sample, subject.draws
    out = run(subject.programs.main, draws.probe("pointed", subject.layout))[0]
    subject.framework.wait(out)
    truths = draws.truths("pointed", False)
    got = _sampled(subject, "out", out)
    exact, plain = [t.out for t in truths], [t.plain_out for t in truths]
    w, what = subject.workload, "output (queries that point at edges)"
    logit = int(probes.pointed_logit(w))
    result = compare(what, got, exact, plain, w.dtype, FORWARD_FACTOR, summed=max(subject.summed, logit * logit))
    _require(result, 0, got, exact, Compass(sample.heads, sample.rows, w.group))


def _verified_at(subject: Subject) -> VerifiedAt:
    """Shares of rows compared with the reference: in float64, or of whole heads in float32."""
    w, draws = subject.workload, subject.draws
    shape = {name: value for name, value in w.axes.items() if isinstance(value, int)}
    exact = subject.declared_error is None
    share = max(draws.sample.share, draws.covered(False).share if exact else 0.0)
    if not w.needs_gradients:
        return VerifiedAt(shape=shape, share=share)
    backward = max(len(draws.gradient_heads) / (w.batch * w.kv_heads), draws.covered(True).share if exact else 0.0)
    return VerifiedAt(shape=shape, share=share, backward_shape=shape, backward_share=backward)
