"""Verification: everything a call must pass before it may be timed, as a list of named checks with their cost.

A subject is one built call with its compiled programs. `examine` compares its outputs with the reference, makes all
CHECKS, and returns the findings, or raises Wrong with the reason, the location of the error and a hint at its cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np

from attnbench.frameworks import OUTPUTS, Inputs
from attnbench.spec import Array, Errors, Partial, VerifiedAt
from attnbench.verifying import probes
from attnbench.verifying.invariants import (
    OVERWRITES,
    check_built_beside,
    check_nan,
    check_one_value,
    check_overwritten_inputs,
    check_places,
    check_prefill_and_decode,
    check_read_beyond,
    check_shared_memory,
    check_strided_dout,
    check_strided_inputs,
    check_unseen_key,
    check_unwritten_memory,
)
from attnbench.verifying.lse_and_partial import check_lse, check_partial_form
from attnbench.verifying.scales import check_after_large, check_magnitudes, check_scale_and_softcap
from attnbench.verifying.subject import LONG_NAMES, Build, Examination, Findings, Subject, Wrong, run
from attnbench.verifying.tolerance import BACKWARD_FACTOR, EPS, FORWARD_FACTOR, Compared, compare, first_over
from attnbench.verifying.whole_output import (
    check_counted,
    check_counted_pairs,
    check_first,
    check_pointed,
    check_steep,
    weights_differ,
)

SETTLE_S = 0.004
"""Seconds for which an output is watched for changes after its call has returned."""
UNLIKE = 4
"""Multiple of the allowed error from which on an output is called another result, not a less exact one."""
SHOWN = 4
"""Number of values of a row, ranges of rows, and heads that are shown of a wrong result."""
ALIKE = 0.02
"""Relative difference up to which two rows count as the same row."""


LIGHT_OFF, LIGHT_ULPS = 0.1, 64
"""Allowed error of a row of `sinks`: a share of it, and ulp of float32 of an element of 1."""


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
    after: bool = False
    """Whether it is made again after the last sample."""


CHECKS = (
    Check("one value in all of V", "1 call", lambda e: check_one_value(e)),
    Check("a key that is not seen", "2 calls", check_unseen_key, thorough=True),
    Check(
        "other batch rows and heads", "1 call",
        lambda e: check_places(e.subject, e.outputs, {name: limits.relative for name, limits in e.limits.items()}),
    ),
    Check("other values in the same memory", "2 calls", check_overwritten_inputs),
    Check("every row", "the reference of all rows", check_first, exact=True),
    Check("keys counted", "2 calls, the reference of all rows", check_counted, exact=True, after=True),
    Check("logits far below 0", "1 call, the reference of the different heads", check_steep, exact=True, after=True),
    Check("pairs counted", "1 call, the reference of all gradients", lambda e: _check_pairs(e), exact=True, after=True),
    Check("gradients at edges of the mask", "1 call, the reference of all gradients", check_pointed, exact=True,
          after=True),
    Check("rows at edges of the mask", "1 call, the reference of sampled rows", lambda e: _check_pointed_rows(e),
          exact=True, after=True),
    Check("tokens of zeros", "1 call, the reference of sampled rows and heads", lambda e: _check_zeros(e), exact=True,
          after=True),
    Check("light keys beside a heavy one", "1 call, the reference of sampled rows and heads",
          lambda e: _check_sinks(e), exact=True, after=True),
    Check("Q, K and V in another order of memory", "1 call; only noted", check_strided_inputs),
    Check("memory that was not written", "1 call", check_unwritten_memory),
    Check("memory beside the inputs", "1 call", check_read_beyond),
    Check("inputs in one array", "2 or 4 calls", check_shared_memory),
    Check("dO in another order of memory", "4 calls, if the pass has gradients", check_strided_dout),
    Check("scale and soft cap", "1 to 33 calls, the reference of sampled rows for two values of each",
          check_scale_and_softcap, exact=True, after=True),
    Check("LSE", "another program, 5 to 10 calls, the reference of sampled rows", check_lse),
    Check("magnitudes", "5 to 7 calls, the reference of sampled rows at two scales", check_magnitudes, after=True),
    Check("another shape beside it", "another build, 1 call", check_built_beside, thorough=True),
    Check("prefill and decode", "2 programs, 2 calls", check_prefill_and_decode, thorough=True),
    Check("partial form", "2 calls, the reference of a head", check_partial_form, thorough=True),
    Check("NaN in V", "2 calls; a hidden one is only noted", check_nan),
    Check("a call after one with larger logits", "8 calls", check_after_large, after=True),
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

    The result of a call before the checks must be the same after the calls that they make.
    `build` and `partial` are as in Examination; without them the checks that need them are left out. CHECKS is a
    default so that a kernel which puts other checks in its place is noticed (run/integrity.py watches defaults).
    """
    examination = Examination(subject, examine_again(subject), thorough, build, partial)
    kept = run(subject.programs.main, subject.inputs[0])
    before = subject.framework.snapshot(kept)
    held: list[str] = []
    for check in checks:
        if (thorough or not check.thorough) and not (check.exact and subject.declared_error is not None):
            held += check.run(examination)
    if not all(subject.framework.same_bits(old, now) for old, now in zip(before, kept)):
        raise Wrong(OVERWRITES)
    errors = msgspec.structs.replace(examination.found.errors, properties=tuple(held), **examination.noted)
    return replace(examination.found, errors=errors, notes=tuple(examination.notes))


def examine_again(subject: Subject) -> Findings:
    """Compare the outputs with the reference only, for a subject that another process has examined."""
    good, compared = _check_outputs(subject)
    again = subject.outputs(subject.inputs[0])
    repeats = all(subject.framework.same_bits(x, y) for x, y in zip(good[0], again.values()))
    limits = {name: result.limits for name, result in compared.items() if result.limits is not None}
    forward = compared.pop("out", None)
    backward = max(compared.values(), key=lambda result: result.error, default=None)
    main = forward or backward
    errors = Errors(
        forward=forward and forward.error,
        backward=backward and backward.error,
        forward_allowed=forward and forward.allowed,
        backward_allowed=backward and backward.allowed,
        max_abs=main and main.max_abs,
    )
    return Findings(errors, _verified_at(subject), repeats, good, limits.pop("out", None), limits or None)


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


def examine_after(subject: Subject, checks: Sequence[Check] = CHECKS) -> None:
    """Compare outputs and make the checks that are marked so again, after the last sample; raises Wrong.

    A path that differs from the verified one fails them. The truths are those of the first examination, and CHECKS is a
    default as in `examine`.
    """
    examination = Examination(subject, examine_again(subject), False, None, None)
    for check in checks:
        if check.after and not (check.exact and subject.declared_error is not None):
            check.run(examination)


def _check_outputs(subject: Subject) -> tuple[list[tuple[Array, ...]], dict[str, Compared]]:
    """Return the outputs on each input set, and the comparison of each output with its truth: the larger error of the
    sets.

    Gradients are compared over whole heads, and not at all if no head fits the reference's budget.
    """
    w = subject.workload
    good = [_honest_call(subject, inputs) for inputs in subject.inputs]
    typical = 0.0 if w.inputs == "sincostan" else w.kv_len**-0.5
    worst: dict[str, Compared] = {}
    for names in (("out",), ("dq", "dk", "dv")):
        for which, arrays in enumerate(map(subject.named, good)):
            for name in _comparable(subject, [name for name in names if name in arrays]):
                least = typical if name == "out" else 0.0
                result = _compare_sampled(subject, name, arrays[name], which, typical=least)
                worst[name] = result.worse(worst.get(name))
    return good, worst


def _comparable(subject: Subject, names: Iterable[str]) -> list[str]:
    """Return the outputs that can be compared in float64: no gradients if no head fits the budget."""
    return [name for name in names if name == "out" or subject.draws.gradient_heads]


def _honest_call(subject: Subject, inputs: Inputs) -> tuple[Array, ...]:
    """Return the outputs of one call; raises Wrong if they are unfinished or of a wrong kind, or inputs changed."""
    fw, w = subject.framework, subject.workload
    before = fw.snapshot(tuple(inputs))
    output = run(subject.programs.main, inputs)
    for array in output:
        if not fw.owns(array):
            raise Wrong(f"returned {type(array).__module__}.{type(array).__name__}, not a plain {fw.name} array")
    at_once = fw.snapshot(output)
    fw.wait(output)
    time.sleep(SETTLE_S)
    names = OUTPUTS[w.pass_]
    if len(output) != len(names):
        raise Wrong(f"returned {len(output)} arrays, expected {len(names)} ({', '.join(names)})")
    q, kv = (w.q_len, w.heads), (w.kv_len, w.kv_heads)
    sizes = {"out": (*q, w.value_dim), "dq": (*q, w.head_dim), "dk": (*kv, w.head_dim), "dv": (*kv, w.value_dim)}
    for name, early, late in zip(names, at_once, output):
        tokens, heads, width = sizes[name]
        shape = (w.batch, *((tokens, heads) if subject.layout == "bshd" else (heads, tokens)), width)
        if tuple(late.shape) != shape:
            raise Wrong(f"{name} has shape {tuple(late.shape)}, expected {shape}")
        if not fw.is_finite(late):
            raise Wrong(f"{name} holds NaN or infinite values, where the reference is finite")
        if not fw.same_bits(early, late):
            raise Wrong(f"returned before its work was done: {name} changed after the call")
        kind = str(late.dtype).rpartition(".")[2]
        if kind != w.dtype:
            raise Wrong(f"{name} is {kind}, but the inputs are {w.dtype}")
    if not all(fw.same_bits(old, new) for old, new in zip(before, inputs)):
        raise Wrong("changed its inputs")
    return at_once


def _compare_sampled(
    subject: Subject, name: str, array: Array, which: int | str, words: str = "", summed: int = 0, typical: float = 0.0
) -> Compared:
    """Compare the rows of an output whose truth on an input set is known; raises Wrong if they are wrong."""
    draws, w = subject.draws, subject.workload
    truths = draws.truths(which, gradients=name != "out")
    got = subject.sampled(name, array)
    exact, plain = [truth.exact(name) for truth in truths], [truth.plain(name) for truth in truths]
    terms = [one for truth in truths if (one := truth.cancelling(name)) is not None] or None
    factor = FORWARD_FACTOR if name == "out" else BACKWARD_FACTOR
    # A logit is rounded by its size, a bias included: as much as a sum of so many terms.
    largest = max((float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (one.lse for one in truths)), default=0.0)
    what, longest = LONG_NAMES[name] + words, max(summed or subject.summed, int(largest) ** 2)
    result = compare(what, got, exact, plain, w.dtype, factor, subject.declared_error, terms, longest, typical)
    if not result.fault:
        return result
    where, detail = "", ""
    if result.first_row is not None:
        heads, rows = draws.known(gradients=name != "out")
        places = RowPlaces(heads, rows if name == "out" else np.arange(exact[0].shape[1]), len(exact[0]))
        which_head, member = divmod(result.first_row // len(places.rows), places.members)
        where = f", first at {subject.place(name, heads[which_head], member)}, row {places.row(result.first_row)}"
        if result.bad is not None:
            detail = describe(got, exact, result.bad, result.first_row, places)
    stored = which == 1 and result.error > UNLIKE * result.allowed
    stale = " (on the second input set only: a stored result?)" if stored else ""
    errors = Errors(forward=result.error, forward_allowed=result.allowed, max_abs=result.max_abs)
    raise Wrong(result.fault + where + stale, errors, detail)


def _check_pointed_rows(examination: Examination) -> tuple[str, ...]:
    """Compare sampled rows in which few keys have all the weight by large logits, so that a clamp shows."""
    subject = examination.subject
    if subject.workload.pass_ == "forward":
        summed = max(subject.summed, int(probes.pointed_logit(subject.workload)) ** 2)
        out = subject.outputs("pointed")["out"]
        _compare_sampled(subject, "out", out, "pointed", " (queries that point at edges)", summed)
    return ()


def _check_pairs(examination: Examination) -> tuple[str, ...]:
    """Compare gradients of inputs to which each pair adds about as much; return the property.

    If an additive mask makes some keys weigh many times as much as others, rounding of a large term hides a small one:
    then whole heads are compared as on any inputs. Nothing is checked if head_dim is 1.
    """
    subject = examination.subject
    if subject.workload.head_dim < 2:
        return ()
    if not weights_differ(subject.workload.visible_mask):
        return check_counted_pairs(examination)
    if subject.workload.needs_gradients and subject.draws.gradient_heads:
        outputs = subject.outputs("counted_pairs")
        for name in ("dq", "dk", "dv"):
            _compare_sampled(subject, name, outputs[name], "counted_pairs", " (pairs counted)")
    return ()


def _check_zeros(examination: Examination) -> tuple[str, ...]:
    """Compare sampled rows and gradients of inputs in which whole tokens are zeros; return the property."""
    subject, outputs = examination.subject, examination.subject.outputs("zeros")
    for name in _comparable(subject, outputs):
        typical = subject.workload.kv_len**-0.5 if name == "out" else 0.0
        _compare_sampled(subject, name, outputs[name], "zeros", " (tokens of zeros)", typical=typical)
    return ("zeros are no padding",)


def _check_sinks(examination: Examination) -> tuple[str, ...]:
    """Compare sampled rows and gradients of V of inputs in which one key in many has nearly all the weight and no
    value, so that a row is made of light keys; return the property.

    A row may be off by a share of itself, and by what adding and taking away values of 1 leaves in float32. Nothing is
    checked if the scale is 0, since no key is heavy then.
    """
    if not examination.subject.workload.softmax_scale:
        return ()
    subject, outputs = examination.subject, examination.subject.outputs("sinks")
    for name in (one for one in _comparable(subject, outputs) if one in ("out", "dv")):
        heads, _ = subject.draws.known(gradients=name != "out")
        truths = subject.draws.truths("sinks", gradients=name != "out")
        for at, got, truth in zip(heads, subject.sampled(name, outputs[name]), truths, strict=True):
            exact = truth.exact(name)
            off, size = (np.linalg.norm(x, axis=-1) for x in (got - exact, exact))
            allowed = LIGHT_OFF * size + LIGHT_ULPS * EPS["float32"] * exact.shape[-1] ** 0.5
            if differs := first_over(off, allowed):
                member, row = differs.place
                where, own = f"{subject.place(name, at, member)}, compared row {row}", size[member, row]
                raise Wrong(
                    f"{LONG_NAMES[name]} (light keys beside a heavy one): {where} is off by {differs.share:.1e}, of "
                    f"{own:.1e}: are keys of little weight left out?"
                )
    return ("light keys count",)


class RowPlaces(NamedTuple):
    """The places of compared arrays [members, rows, width], one per entry of `heads` (batch, key/value head)."""

    heads: Sequence[tuple[int, int]]
    rows: np.ndarray
    members: int
    """Query heads of a key/value head; 1 for gradients of K and V."""

    def head(self, flat: int) -> tuple[int, int]:
        """Return (batch, head) of a row by its flat index."""
        which, rest = divmod(flat, self.members * len(self.rows))
        batch, index = self.heads[which]
        return batch, index * self.members + rest // len(self.rows)

    def row(self, flat: int) -> int:
        """Return the token of a row by its flat index."""
        return int(self.rows[flat % len(self.rows)])


def describe(
    got: Sequence[np.ndarray], exact: Sequence[np.ndarray], bad: np.ndarray, first: int, places: RowPlaces
) -> str:
    """Return several lines about the wrong rows, which `bad` marks among all rows, by flat index."""
    mine, truth = (np.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays]) for arrays in (got, exact))
    wrong = np.flatnonzero(bad) if bad.any() else np.array([first])
    batch, head = places.head(first)
    heads = sorted({places.head(int(flat)) for flat in wrong})
    total = len(places.heads) * places.members
    shown = ", ".join(f"{b}:{h}" for b, h in heads[:SHOWN]) + (", ..." if len(heads) > SHOWN else "")
    rows = _ranges(sorted({places.row(int(flat)) for flat in wrong}))
    lines = [
        f"{len(wrong)} of {len(bad)} compared rows are wrong",
        "heads (batch:head): "
        + (f"all {total} compared" if len(heads) == total else f"{shown} ({len(heads)} of {total} compared)"),
        f"rows: {rows} of {_ranges(sorted(places.rows.tolist()))}",
        f"first at batch {batch}, head {head}, row {places.row(first)}:",
        f"  got      {_values(mine[first])}",
        f"  expected {_values(truth[first])}",
    ]
    hint = _factor_hint(mine[wrong], truth[wrong]) or _other_head_hint(mine[first], truth, first, places)
    return "\n".join([*lines, hint] if hint else lines)


def _ranges(numbers: Sequence[int]) -> str:
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(ranges[:SHOWN]) + (f", ... ({len(numbers)} rows)" if len(ranges) > SHOWN else "")


def _values(row: np.ndarray) -> str:
    return " ".join(f"{value: .4g}" for value in row[:SHOWN]) + (" ..." if len(row) > SHOWN else "")


def _factor_hint(mine: np.ndarray, truth: np.ndarray) -> str:
    """Return a hint if every wrong row is the right one times one number; else an empty text."""
    scale = float(np.vdot(truth, truth))
    if not scale or not np.isfinite(mine).all():
        return ""
    factor = float(np.vdot(mine, truth)) / scale
    rest = float(np.linalg.norm(mine - factor * truth)) / scale**0.5
    if rest > ALIKE * abs(factor) or abs(factor) < ALIKE:
        return "all of the wrong rows are 0" if not mine.any() else ""
    why = "check scale, softcap and output factors" if 0.8 < factor < 1.25 else "a missing or doubled factor?"
    return f"the wrong rows are {factor:.4g} x the expected ones: {why}"


def _other_head_hint(row: np.ndarray, truth: np.ndarray, first: int, places: RowPlaces) -> str:
    """Return a hint if a wrong row is right for another head; else an empty text."""
    same_row = range(first % len(places.rows), len(truth), len(places.rows))
    for flat in same_row:
        size = float(np.linalg.norm(truth[flat]))
        if flat != first and size and float(np.linalg.norm(row - truth[flat])) < ALIKE * size:
            batch, head = places.head(flat)
            return f"this row is the expected one of batch {batch}, head {head}: are heads or groups mixed up?"
    return ""
