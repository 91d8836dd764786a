"""Results at other magnitudes, and estimates of scale and soft cap.

Attention is linear in V and in dO, and the same for q * 2^n and k / 2^n: powers of two multiply its results exactly.
Inputs ten and a hundred times as large have logits far beyond those of the other checks: a kernel that clamps, caps or
overflows gives finite numbers there, and wrong ones.

A wrong scale or soft cap moves all results in one known direction. The error along that direction is an estimate of how
wrong it is, and over many elements far sharper than any norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from attnbench.frameworks import Inputs
from attnbench.spec import DTYPE_BYTES, Array
from attnbench.verifying.draws import SCALED, SETS
from attnbench.verifying.invariants import head_norms, rounded_of_head
from attnbench.verifying.subject import Examination, Subject, Wrong
from attnbench.verifying.tolerance import EPS, SLACK, Limits, apart, first_over, rounded_terms, spot, typical_row
from attnbench.verifying.truths import Truth, named

SCALES = (0.1, 1.0, 10.0, 100.0)
COMPARED = (10.0, 100.0)
"""Scales at which results are compared with the reference, not only required to be finite."""
OUTLIER = 1e4
LARGE_FACTOR, LARGE_FLOOR, LARGE_MOST = 4, {2: 0.35, 4: 0.02, 8: 0.02}, 0.6
"""Allowed error of one head at these scales: times the plain implementation's error, plus a share by bytes of an
element. Rounding a large logit exchanges keys that nearly tie, in few rows; a clamp changes most rows."""
CLEAR_GAP, CLEAR_ROUNDED, CLEAR_ROW, CLEAR_ULPS = 10.0, 8, 5e-3, 4
"""Bounds of clear rows, whose largest logit is above the second by more than this and so many ulp of the largest one:
no rounding of logits exchanges their keys. The last two are their allowed error: a share of the row or of a typical
row, and ulp."""
POWERS = ((20, -20, 10), (-20, 20, -10))
FLOAT16_POWERS = ((4, 2, 2), (2, 4, -2))
"""Powers of two for V, dO and Q (K gets the inverse), of each call: as far as the exponents of the dtype go."""


def check_magnitudes(examination: Examination) -> tuple[str, ...]:
    """Check results at all scales, note the scales that were tried, and return the property that holds.

    Scales at which the inputs overflow are skipped. For an implementation that declares its error, results need only
    be finite.
    """
    subject, fw = examination.subject, examination.subject.framework
    exact = subject.declared_error is None
    if exact:
        _check_powers(subject, examination.outputs, examination.limits)
    tried: list[str] = []
    for scale in SCALES if examination.thorough else COMPARED:
        inputs = subject.draws.probe(f"{SCALED}{scale:g}", subject.layout)
        if all(fw.is_finite(x) for x in inputs):
            outputs = subject.outputs(inputs)
            _require_finite(subject, outputs, f"inputs scaled by {scale:g}")
            if exact and scale in COMPARED:
                require_right(subject, scale, outputs)
            tried.append(f"{scale:g}")
    first = subject.inputs[0]
    q, k = (fw.put(x, (0, 0, 0, 0), OUTLIER) for x in (first.q, first.k))
    _require_finite(subject, subject.outputs(first._replace(q=q, k=k)), f"one input of {OUTLIER:g}")
    examination.noted["stability"] = "scales " + ", ".join([*tried, "outlier"])
    return ("exact under powers of two",) if exact else ()


LARGER = (15.0, 70.0, 85.0, 100.0)
"""Logits of calls before one of the first input set, beyond its own largest: exponentials of its logits minus these end
in what float16, and float32 with and without subnormal numbers, cannot hold."""


def check_after_large(examination: Examination) -> tuple[str, ...]:
    """Check that a call after one with larger logits gives what it gave before; return the property.

    A kernel that keeps a maximum or a scale from call to call would lose small weights in it.
    """
    subject, fw, good = examination.subject, examination.subject.framework, examination.outputs
    first, dtype = subject.inputs[0], subject.workload.dtype
    largest = float(subject.draws.logit_gaps(0)[1].max())
    for beyond in LARGER if largest > 0 else ():
        q = fw.multiply(first.q, np.array((largest + beyond) / largest))
        if not fw.is_finite(q):
            continue
        subject.outputs(first._replace(q=fw.cast(q, dtype)))
        for name, got in subject.outputs(first).items():
            if differs := apart(fw, got, good[name], examination.limits[name], dtype):
                raise Wrong(
                    f"{name} is wrong after a call whose logits are larger by {beyond:g}: "
                    f"{spot(differs, subject.layout)} differs by {differs.share:.1e}, {differs.allowed:.1e} allowed"
                )
    return ("no memory of larger logits",)


def _check_powers(subject: Subject, good: Mapping[str, Array], limits: Mapping[str, Limits]) -> None:
    fw, w, first = subject.framework, subject.workload, subject.inputs[0]
    for of_v, of_dout, of_q in FLOAT16_POWERS if w.dtype == "float16" else POWERS:
        powers = (of_q, -of_q, of_v, of_dout)
        inputs = Inputs(*(fw.multiply(x, np.array(2.0**n)) for x, n in zip(first, powers)))
        if not all(fw.is_finite(x) for x in inputs):
            continue
        back = {"out": -of_v, "dq": of_q - of_v - of_dout, "dk": -of_q - of_v - of_dout, "dv": -of_dout}
        for name, array in subject.outputs(inputs).items():
            found = fw.multiply(array, np.array(2.0 ** back[name]))
            if fw.same_bits(found, good[name]):
                continue
            right = fw.cast(good[name], subject.wide)
            size, off = (head_norms(subject, x) for x in (right, fw.cast(found, subject.wide) - right))
            allowed = SLACK * limits[name].relative * np.maximum(size, 0.1 * np.median(size))
            allowed = allowed + rounded_of_head(subject, name)
            if differs := first_over(off, allowed):
                batch, head = differs.place
                raise Wrong(
                    f"{name} does not follow its inputs: V times 2^{of_v}, dO times 2^{of_dout}, Q times 2^{of_q} and "
                    f"K times 2^{-of_q} multiply it exactly, but batch {batch}, head {head} differs by "
                    f"{differs.share:.1e}, {differs.allowed:.1e} allowed"
                )


def _require_finite(subject: Subject, outputs: Mapping[str, Array], case: str) -> None:
    if not all(subject.framework.is_finite(array) for array in outputs.values()):
        raise Wrong(f"unstable: NaN or Inf with {case}, where the reference is finite")


def require_right(subject: Subject, scale: float, outputs: Mapping[str, Array]) -> None:
    """Compare the output's sampled rows with the truth, or the whole dV of a head if there is no output.

    Clear rows are compared one by one (none with a soft cap, near which all keys tie), and all together as far as
    rounding lets keys that nearly tie change places.
    """
    draws, w, inputs = subject.draws, subject.workload, f"{SCALED}{scale:g}"
    name = "out" if "out" in outputs else "dv"
    heads, _ = draws.known(gradients=name == "dv")
    if not heads:
        return
    clear = None
    if name == "out":
        gap, largest = draws.logit_gaps(inputs)
        clear = (gap > CLEAR_GAP + CLEAR_ROUNDED * EPS[w.dtype] * largest) & (w.softcap is None)
    sampled = subject.sampled(name, outputs[name])
    for n, (at, got, truth) in enumerate(zip(heads, sampled, draws.truths(inputs, name == "dv"))):
        exact, plain = truth.exact(name), truth.plain(name)
        if clear is not None:
            _require_clear_rows(subject, scale, at, clear[n], got, exact)
        size, off, usual = (np.linalg.norm(x, axis=(1, 2)) for x in (exact, got - exact, plain - exact))
        size = np.where(size > 0, size, 1.0)
        usual = np.where(np.isfinite(usual), usual / size, 1.0)
        allowed = np.minimum(LARGE_FACTOR * usual + LARGE_FLOOR[DTYPE_BYTES[w.dtype]], LARGE_MOST)
        if differs := first_over(off / size, allowed):
            head = subject.members(name, at).start + differs.place[0]
            raise Wrong(
                f"{name} is wrong for inputs scaled by {scale:g} (large logits): batch {at[0]}, head {head} is off by "
                f"{differs.share:.1e}, {differs.allowed:.1e} allowed"
            )


def _require_clear_rows(
    subject: Subject, scale: float, at: tuple[int, int], clear: np.ndarray, got: np.ndarray, exact: np.ndarray
) -> None:
    """Require that clear rows of one head [members, rows, width], whose weight is all on one key, are right."""
    off, size = (np.linalg.norm(x, axis=-1) for x in (got - exact, exact))
    share = np.where(clear, off / np.maximum(size, typical_row(size)), 0.0)
    allowed = CLEAR_ROW + CLEAR_ULPS * EPS[subject.workload.dtype]
    if differs := first_over(share, allowed):
        member, row = differs.place
        raise Wrong(
            f"out is wrong for inputs scaled by {scale:g} (large logits): {np.count_nonzero(~(share <= allowed))} of "
            f"{np.count_nonzero(clear)} rows in which one key has all the weight, first at batch {at[0]}, head "
            f"{at[1] * subject.workload.group + member}, row {subject.draws.sample.rows[row]} (off by "
            f"{differs.share:.1e}, {allowed:.1e} allowed)"
        )


STEP = 1e-3
SCALE_OFF, CAP_OFF = 0.002, 0.04
"""Shares by which a right kernel may seem off; it may round the scale to 16 bits, which is half of 0.4 %."""
TAIL = 3e-7
"""Chance that a right kernel seems further off: 5 standard errors of many rows, more of few."""
PLAIN_FACTOR = 2
"""Multiple of the plain implementation's estimate that is allowed in addition."""
ENOUGH_ROWS, MOST_SETS = 64, 32
"""Rows that an estimate needs, and the most input sets that are drawn to reach them."""

Sets = Mapping[int | str, Mapping[str, Sequence[np.ndarray]]]
"""Input set or probe -> the outputs on it, {name: sampled heads}."""


def check_scale_and_softcap(examination: Examination) -> tuple[str, ...]:
    """Estimate scale and soft cap from the outputs on the first input set; raises Wrong if one is off.

    More sets are drawn if the first has too few rows or is not of normal numbers. Gradients show the soft cap best on
    logits near it.
    """
    subject, outputs = examination.subject, examination.outputs
    w, draws = subject.workload, subject.draws
    asked = {"scale": (w.softmax_scale, SCALE_OFF)}
    if w.softcap is not None:
        asked["softcap"] = (w.softcap, CAP_OFF)
    rows = len(draws.sample.heads) * min(w.group * len(draws.sample.rows), w.kv_len)
    if rows < ENOUGH_ROWS or w.inputs != "normal":
        more = min(MOST_SETS, -(-ENOUGH_ROWS // rows))
        sets: Sets = {which: _sampled(subject, subject.outputs(which)) for which in range(SETS, SETS + more)}
    else:
        sets = {0: _sampled(subject, outputs)}
    names = [name for name in outputs if name == "out" or draws.gradient_heads]
    for parameter, (value, off) in asked.items():
        for name in names if value else ():
            _require_estimate(subject, name, parameter, value, off, sets)
    if w.softcap is not None and (gradients := [name for name in names if name != "out"]):
        pointed: Sets = {"pointed": _sampled(subject, subject.outputs("pointed"))}
        for name in gradients:
            _require_estimate(subject, name, "softcap", w.softcap, CAP_OFF, pointed)
    return ()


def _sampled(subject: Subject, outputs: Mapping[str, Array]) -> Mapping[str, Sequence[np.ndarray]]:
    return {name: subject.sampled(name, array) for name, array in outputs.items()}


def _require_estimate(subject: Subject, name: str, parameter: str, value: float, off: float, sets: Sets) -> None:
    """Require that a parameter, estimated over all sampled heads, is near its value; the scale in every head too, since
    one wrong head among many moves the estimate over all of them little."""
    draws, gradients = subject.draws, name != "out"
    results: list[_Result] = []
    for which, outputs in sets.items():
        found = draws.shifted(which, gradients, STEP, parameter, value)
        for got, truth, slope in zip(outputs[name], draws.truths(which, gradients), found):
            exact, own = truth.exact(name), _without_rounding(named(slope, name), truth, name)
            queries = _without_rounding(named(slope, "dq"), truth, "dq") if gradients else own
            results.append(_Result(exact, got - exact, truth.plain(name) - exact, own, queries))
    dtype = subject.workload.dtype
    _require_near(f"{name}: as if {parameter} were", results, value, off, dtype)
    heads, members = draws.known(gradients)[0], len(results[0].error)
    count = len(heads) * members
    if parameter != "scale" or count == 1:
        return
    for n, at in enumerate(heads):
        for member in range(members):  # of each head on the first set, then on the next
            mine = [
                _Result(one.exact[member], one.error[member], one.usual[member], one.slope[member], one.queries)
                for one in results[n :: len(heads)]
            ]
            what = f"{name}: as if in {subject.place(name, at, member)} scale were"
            _require_near(what, mine, value, off, dtype, TAIL / count)


class _Result(NamedTuple):
    """Arrays [..., rows, width] of a head: the exact result, the errors of the one under test and of a plain one, and
    the slopes, of the result and of what comes from each query."""

    exact: np.ndarray
    error: np.ndarray
    usual: np.ndarray
    slope: np.ndarray
    queries: np.ndarray


def _without_rounding(slope: np.ndarray, truth: Truth, name: str) -> np.ndarray:
    """Return a slope without the rows that are only what rounding leaves of cancelling terms in the reference, as those
    of a query that sees one key: their gradient is 0 at any scale."""
    if (terms := truth.cancelling(name)) is None:
        return slope
    least = rounded_terms(terms, "float64", slope.shape[-1]) / STEP
    return np.where((np.linalg.norm(slope, axis=-1) > least)[..., None], slope, 0.0)


def _require_near(
    what: str, results: Sequence[_Result], value: float, off: float, dtype: str, tail: float = TAIL
) -> None:
    """Require that the parameter that the results seem to have is near its value.

    Nothing is required if doubling it would change them by less than an ulp: then all errors may have one direction.
    """
    exact, errors, usual, slopes, queries = zip(*results)
    size, slope = (sum(float(np.vdot(x, x)) for x in arrays) ** 0.5 for arrays in (exact, slopes))
    if slope < EPS[dtype] * size:
        return
    independent = _effective_rows(queries)
    (share, chance), (plain, _) = (estimate(some, slopes, tail, independent) for some in (errors, usual))
    limit = off + chance + PLAIN_FACTOR * abs(plain)
    if not abs(share) <= limit:
        raise Wrong(
            f"{what} {value * (1 + share):.5g}, not {value:.5g} (off by {100 * share:.2g} %, {100 * limit:.2g} % "
            "allowed)"
        )


def _effective_rows(slopes: Sequence[np.ndarray]) -> float:
    """Return how many rows of equal size would tell as much as those of slopes [..., rows, width]."""
    weights = np.concatenate([np.einsum("...ij,...ij->...i", x, x).ravel() for x in slopes])
    squares = float(weights @ weights)  # slopes may be so small that their squares are 0
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def estimate(
    errors: Sequence[np.ndarray], slopes: Sequence[np.ndarray], tail: float = TAIL, independent: float = inf
) -> tuple[float, float]:
    """Return the multiple of the slopes [..., rows, width] that fits the errors best, which is the share by which a
    parameter seems off, and how far chance alone may move it; (0, inf) without any slope.

    Errors within a row are not independent, since a rounded logit moves all of it; those of different rows are taken as
    independent, but no more of them than `independent`: a rounded logit of one query moves the gradients of all keys.
    """
    found_rows = _effective_rows(slopes)
    if not found_rows:
        return 0.0, inf
    error, slope = (np.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays]) for arrays in (errors, slopes))
    size = float(np.vdot(slope, slope))
    found = float(np.vdot(error, slope)) / size
    rest = np.einsum("ij,ij->i", error - found * slope, slope)
    rows = min(found_rows, independent)
    if rows < 2:
        return found, inf
    from scipy.special import stdtrit

    return found, float(-stdtrit(rows - 1, tail) * np.linalg.norm(rest) / size) * (found_rows / rows) ** 0.5
