"""Verification: everything a call must pass before it may be timed, as a list of named checks with their cost.

A subject is one built call with its compiled programs. `examine` compares its outputs with the reference, makes all
CHECKS, and returns the findings, or raises Wrong with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from attnbench.frameworks import OUTPUTS, Inputs
from attnbench.spec import Array, Errors, Partial, VerifiedAt, Workload
from attnbench.verifying import probes, whole_output
from attnbench.verifying.error_location import RowPlaces, describe
from attnbench.verifying.invariants import (
    Build,
    check_one_value,
    check_overwritten_inputs,
    check_places,
    check_prefill_and_decode,
    check_unseen_key,
    hidden_nan,
)
from attnbench.verifying.lse_and_partial import check_lse, check_partial_form
from attnbench.verifying.scales import check_magnitudes, check_scale_and_softcap
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.tolerance import BACKWARD_FACTOR, FORWARD_FACTOR, Compared, Limits, compare

SETTLE_S = 0.004
"""Seconds for which an output is watched for changes after its call has returned."""
UNLIKE = 4
"""Multiple of the allowed error from which on an output is called another result, not a less exact one."""


@dataclass(frozen=True)
class Findings:
    """Results of a right subject; `good` are its outputs on each input set, for checks between timings."""

    errors: Errors
    verified_at: VerifiedAt
    deterministic: bool
    good: list[tuple[Array, ...]]
    forward: Limits | None
    backward: Mapping[str, Limits] | None
    """Allowed errors of each gradient; as those of `forward`, None if they were not compared."""

    def limits(self, name: str, dtype: str) -> Limits:
        """Return the allowed errors of an output.

        Gradients that were too large to compare are allowed what follows from the output's limits.
        """
        known = (self.backward or {}).get(name) if name.startswith("d") else self.forward
        if known is not None:
            return known
        return Limits.of_rounding(dtype) if self.forward is None else self.forward.widened(BACKWARD_FACTOR)


@dataclass
class Examination:
    """A subject whose outputs are right on the drawn inputs, and the results of further checks."""

    subject: Subject
    found: Findings
    thorough: bool
    build: Build | None
    """Function that returns the implementation's call for another workload, or None."""
    partial: Callable[[], Partial | None] | None
    """Function that returns the implementation's partial form, or None."""
    lse: float | None = None
    """Error of the LSE."""
    stability: str = ""
    """Scales of the inputs at which results are finite and right."""
    hidden_nan: str = ""
    """Reach of a NaN that the mask hides: contained or leaks."""

    @property
    def outputs(self) -> dict[str, Array]:
        """Verified outputs on the first input set, by name."""
        return _named(self.subject.workload, self.found.good[0])

    @property
    def limits(self) -> dict[str, Limits]:
        """Allowed errors of each output."""
        dtype = self.subject.workload.dtype
        return {name: self.found.limits(name, dtype) for name in OUTPUTS[self.subject.workload.pass_]}


class Check(NamedTuple):
    """A check of `examine`."""

    name: str
    cost: str
    run: Callable[[Examination], Sequence[str]]
    """Function that raises Wrong, or returns the properties that hold, for the record."""
    exact: bool = False
    """Whether it is left out for an implementation that declares an error of its own."""
    thorough: bool = False
    """Whether it is made in thorough examinations only."""


CHECKS = (
    Check("one value in all of V", "1 call", lambda e: check_one_value(e.subject)),
    Check("a key that is not seen", "2 calls", lambda e: check_unseen_key(e.subject), thorough=True),
    Check(
        "other batch rows and heads", "1 call",
        lambda e: check_places(e.subject, e.outputs, {name: limits.relative for name, limits in e.limits.items()}),
    ),
    Check("other values in the same memory", "2 calls",
          lambda e: check_overwritten_inputs(e.subject, e.found.good[1], e.limits)),
    Check("every row", "the reference of all rows",
          lambda e: whole_output.check_first(e.subject, e.outputs, e.limits), exact=True),
    Check("keys counted", "2 calls, the reference of all rows",
          lambda e: whole_output.check_counted(e.subject), exact=True),
    Check("logits far below 0", "1 call, the reference of the different heads",
          lambda e: whole_output.check_steep(e.subject), exact=True),
    Check("pairs counted", "1 call, the reference of all gradients",
          lambda e: whole_output.check_counted_pairs(e.subject), exact=True),
    Check("gradients at edges of the mask", "1 call, the reference of all gradients",
          lambda e: whole_output.check_pointed(e.subject), exact=True),
    Check("rows at edges of the mask", "1 call, the reference of sampled rows",
          lambda e: _check_pointed_rows(e.subject), exact=True),
    Check("scale and soft cap", "1 to 33 calls, the reference of sampled rows for two values of each",
          lambda e: _check_parameters(e.subject, e.outputs), exact=True),
    Check("LSE", "another program, 5 to 10 calls, the reference of sampled rows", lambda e: _check_lse(e)),
    Check("magnitudes", "5 to 7 calls, the reference of sampled rows at two scales", lambda e: _check_magnitudes(e)),
    Check("prefill and decode", "2 programs, 2 calls", lambda e: _check_prefill_and_decode(e), thorough=True),
    Check("partial form", "2 calls, the reference of a head", lambda e: _check_partial_form(e), thorough=True),
    Check("a hidden NaN", "1 call; only noted", lambda e: _check_hidden_nan(e)),
)  # fmt: skip
"""Checks after the comparison of sampled rows with the reference, the cheap ones first."""


def examine(
    subject: Subject,
    thorough: bool,
    build: Build | None = None,
    partial: Callable[[], Partial | None] | None = None,
    checks: Sequence[Check] = CHECKS,
) -> Findings:
    """Compare the outputs with the reference, then make all checks in order; raises Wrong at the first that fails.

    `build` and `partial` are as in Examination; without them the checks that need them are left out. CHECKS is a
    default so that a kernel which puts other checks in its place is noticed (run/integrity.py watches defaults).
    """
    examination = Examination(subject, examine_again(subject), thorough, build, partial)
    held: list[str] = []
    for check in checks:
        if (thorough or not check.thorough) and not (check.exact and subject.declared_error is not None):
            held += check.run(examination)
    errors = msgspec.structs.replace(
        examination.found.errors,
        lse=examination.lse,
        stability=examination.stability,
        properties=tuple(held),
        hidden_nan=examination.hidden_nan,
    )
    return replace(examination.found, errors=errors)


def examine_again(subject: Subject) -> Findings:
    """Compare the outputs with the reference only, for a subject that another process has examined."""
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
    """Check outputs, keys and pairs counted, scale and soft cap again after the last sample.

    These checks show a path that differs from the verified one or is coarser. The truths are those of the first
    examination.
    """
    good, *_ = _check_outputs(subject)
    if subject.declared_error is not None:
        return
    whole_output.check_counted(subject)
    whole_output.check_counted_pairs(subject)
    _check_parameters(subject, _named(subject.workload, good[0]))


def _check_outputs(subject: Subject) -> tuple[list[tuple[Array, ...]], Compared | None, dict[str, Compared]]:
    """Return the outputs on each input set, with the comparison of the forward result and of each gradient."""
    good = [_honest_call(subject, inputs) for inputs in subject.draws.inputs(subject.layout)]
    outputs = [_named(subject.workload, arrays) for arrays in good]
    forward = _check_forward(subject, outputs) if "out" in outputs[0] else None
    backward = _check_backward(subject, outputs) if subject.workload.needs_gradients else {}
    return good, forward, backward


def _honest_call(subject: Subject, inputs: Inputs) -> tuple[Array, ...]:
    """Return the outputs of one call; raises Wrong unless they are finished arrays of the right kind and the inputs are
    unchanged."""
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
            result, which, got, [t.out for t in truths], RowPlaces(sample.heads, sample.rows, subject.workload.group)
        )
        worst = result.worse(worst)
    assert worst is not None
    return worst


def _check_backward(subject: Subject, outputs: list[dict[str, Any]]) -> dict[str, Compared]:
    """Return the comparison of dq, dk and dv over whole heads; empty if no head fits the reference's budget."""
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
            _require(result, which, got, exact, RowPlaces(heads, np.arange(exact[0].shape[1]), members))
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
    places: RowPlaces | None = None,
) -> None:
    if not result.fault:
        return
    where, detail = "", ""
    if places is not None and result.first_row is not None:
        batch, head = places.head(result.first_row)
        kind = "key/value head" if result.fault.startswith(("gradient of K", "gradient of V")) else "head"
        where = f", first at batch {batch}, {kind} {head}, row {places.row(result.first_row)}"
        if result.bad is not None:
            detail = describe(got, exact, result.bad, result.first_row, places)
    stored = which and result.error > UNLIKE * result.allowed
    stale = " (on the second input set only: a stored result?)" if stored else ""
    errors = Errors(forward=result.error, forward_allowed=result.allowed, max_abs=result.max_abs)
    raise Wrong(result.fault + where + stale, errors, detail)


def _repeats(subject: Subject, first: tuple[Array, ...]) -> bool:
    again = run(subject.programs.main, subject.draws.inputs(subject.layout)[0])
    subject.framework.wait(again)
    return all(subject.framework.same_bits(a, b) for a, b in zip(first, again))


def _sampled(subject: Subject, name: str, array: Array) -> list[np.ndarray]:
    """Return rows [members, rows, width] of each head whose truth is known in float64."""
    sample, draws = subject.draws.sample, subject.draws
    if name == "out":
        return [subject.head_rows(array, at[0], _groups(subject, at)[0], sample.rows) for at in sample.heads]
    part = 0 if name == "dq" else 1
    return [subject.head_rows(array, at[0], _groups(subject, at)[part], None) for at in draws.gradient_heads]


def _check_pointed_rows(subject: Subject) -> tuple[str, ...]:
    """Compare sampled rows in which few keys have all the weight by large logits, so that a clamp shows."""
    if subject.workload.pass_ != "forward":
        return ()
    sample, draws = subject.draws.sample, subject.draws
    out = run(subject.programs.main, draws.probe("pointed", subject.layout))[0]
    subject.framework.wait(out)
    truths = draws.truths("pointed", False)
    got = _sampled(subject, "out", out)
    exact, plain = [t.out for t in truths], [t.plain_out for t in truths]
    w, what = subject.workload, "output (queries that point at edges)"
    logit = int(probes.pointed_logit(w))
    result = compare(what, got, exact, plain, w.dtype, FORWARD_FACTOR, summed=max(subject.summed, logit * logit))
    _require(result, 0, got, exact, RowPlaces(sample.heads, sample.rows, w.group))
    return ()


def _verified_at(subject: Subject) -> VerifiedAt:
    """Return the shares of rows that are compared with the reference, in float64 or as whole heads in float32."""
    w, draws = subject.workload, subject.draws
    shape = {name: value for name, value in w.axes.items() if isinstance(value, int)}
    exact = subject.declared_error is None
    share = max(draws.sample.share, draws.covered(False).share if exact else 0.0)
    if not w.needs_gradients:
        return VerifiedAt(shape=shape, share=share)
    backward = max(len(draws.gradient_heads) / (w.batch * w.kv_heads), draws.covered(True).share if exact else 0.0)
    return VerifiedAt(shape=shape, share=share, backward_shape=shape, backward_share=backward)


def _check_parameters(subject: Subject, outputs: Mapping[str, Array]) -> tuple[str, ...]:
    sampled = {name: _sampled(subject, name, array) for name, array in outputs.items()}
    check_scale_and_softcap(subject, sampled, _sampled)
    return ()


def _check_lse(examination: Examination) -> tuple[str, ...]:
    found = examination.found
    result = check_lse(examination.subject, found.good, found.limits("out", examination.subject.workload.dtype))
    examination.lse = result and result.error
    return ()


def _check_magnitudes(examination: Examination) -> tuple[str, ...]:
    scales, powers = check_magnitudes(
        examination.subject, examination.outputs, examination.limits, examination.thorough
    )
    examination.stability = scales
    return (powers,) if powers else ()


def _check_prefill_and_decode(examination: Examination) -> tuple[str, ...]:
    if examination.build is None or examination.subject.workload.pass_ == "backward":
        return ()
    good, relative = examination.outputs["out"], examination.limits["out"].relative
    return check_prefill_and_decode(examination.subject, good, relative, examination.build)


def _check_partial_form(examination: Examination) -> tuple[str, ...]:
    if examination.partial is None:
        return ()
    relative = examination.found.limits("out", examination.subject.workload.dtype).relative
    return check_partial_form(examination.subject, examination.partial(), relative)


def _check_hidden_nan(examination: Examination) -> tuple[str, ...]:
    examination.hidden_nan = hidden_nan(examination.subject)
    return ()
