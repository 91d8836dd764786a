"""Results at other magnitudes, and estimates of scale and soft cap.

Attention is linear in V and in dO, and the same for q * 2^n and k / 2^n: powers of two multiply its results exactly.
Inputs ten and a hundred times as large have logits far beyond those of the other checks: a kernel that clamps, caps or
overflows gives finite numbers there, and wrong ones.

A wrong scale or soft cap moves all results in one known direction. The error along that direction is an estimate of how
wrong it is, and over many elements far sharper than any norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attnbench.frameworks import OUTPUTS, Inputs
from attnbench.spec import DTYPE_BYTES, Array
from attnbench.verifying.draws import SCALED, SETS
from attnbench.verifying.invariants import head_norms
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.tolerance import EPS, SLACK, Limits, rounded_terms, typical_row

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


def check_magnitudes(
    subject: Subject, good: Mapping[str, Array], limits: Mapping[str, Limits], thorough: bool
) -> tuple[str, str]:
    """Check results at all scales and return the scales that were tried, and the property that holds.

    `good` are the outputs on the first input set.
    """
    held = "" if subject.declared_error is not None else _check_powers(subject, good, limits)
    scales = SCALES if thorough else COMPARED
    tried = [f"{scale:g}" for scale in scales if _check_scale(subject, scale)]
    first, fw = subject.draws.inputs(subject.layout)[0], subject.framework
    q, k = (fw.put(x, (0, 0, 0, 0), OUTLIER) for x in (first.q, first.k))
    _require_finite(subject, run(subject.programs.main, first._replace(q=q, k=k)), f"one input of {OUTLIER:g}")
    return "scales " + ", ".join([*tried, "outlier"]), held


def _check_powers(subject: Subject, good: Mapping[str, Array], limits: Mapping[str, Limits]) -> str:
    fw, w = subject.framework, subject.workload
    first = subject.draws.inputs(subject.layout)[0]
    for of_v, of_dout, of_q in FLOAT16_POWERS if w.dtype == "float16" else POWERS:
        powers = (of_q, -of_q, of_v, of_dout)
        inputs = Inputs(*(fw.multiply(x, np.array(2.0**n)) for x, n in zip(first, powers)))
        if not all(fw.is_finite(x) for x in inputs):
            continue
        outputs = run(subject.programs.main, inputs)
        fw.wait(outputs)
        back = {"out": -of_v, "dq": of_q - of_v - of_dout, "dk": -of_q - of_v - of_dout, "dv": -of_dout}
        for name, array in zip(OUTPUTS[w.pass_], outputs):
            found = fw.multiply(array, np.array(2.0 ** back[name]))
            if fw.same_bits(found, good[name]):
                continue
            wide = "float64" if w.dtype == "float64" else "float32"
            right = fw.cast(good[name], wide)
            size, off = (head_norms(subject, x) for x in (right, fw.cast(found, wide) - right))
            allowed = SLACK * limits[name].relative * np.maximum(size, 0.1 * np.median(size)) + _rounded(subject, name)
            if (over := ~(off <= allowed)).any():
                batch, head = (int(n) for n in np.argwhere(over)[0])
                raise Wrong(
                    f"{name} does not follow its inputs: V times 2^{of_v}, dO times 2^{of_dout}, Q times 2^{of_q} and "
                    f"K times 2^{-of_q} multiply it exactly, but batch {batch}, head {head} differs by "
                    f"{off[batch, head]:.1e}, {allowed[batch, head]:.1e} allowed"
                )
    return "exact under powers of two"


def _rounded(subject: Subject, name: str) -> float:
    """Return what rounding may leave of the terms that cancel in the gradient of a whole head."""
    draws = subject.draws
    if name not in ("dq", "dk") or not draws.gradient_heads:
        return 0.0
    found = [truth.cancelling_grads for truth in draws.truths(0, True)]
    terms = [grads[name == "dk"] for grads in found if grads is not None]
    least = (rounded_terms(one, subject.workload.dtype, subject.workload.head_dim) for one in terms)
    return max((float(np.linalg.norm(one)) for one in least), default=0.0)


def _check_scale(subject: Subject, scale: float) -> bool:
    """Check results at a scale and return whether it could be tried: inputs that overflow say nothing."""
    inputs = subject.draws.scaled(subject.layout, scale)
    if not all(subject.framework.is_finite(x) for x in inputs):
        return False
    outputs = run(subject.programs.main, inputs)
    _require_finite(subject, outputs, f"inputs scaled by {scale:g}")
    if subject.declared_error is None and scale in COMPARED:
        require_right(subject, scale, dict(zip(OUTPUTS[subject.workload.pass_], outputs)))
    return True


def _require_finite(subject: Subject, outputs: tuple[Array, ...], case: str) -> None:
    if not all(subject.framework.is_finite(array) for array in outputs):
        raise Wrong(f"unstable: NaN or Inf with {case}, where the reference is finite")


def require_right(subject: Subject, scale: float, outputs: Mapping[str, Array]) -> None:
    """Compare the output's sampled rows with the truth, or the whole dV of a head if there is no output.

    Clear rows are compared one by one, and all together as far as rounding lets keys that nearly tie change places.
    """
    draws, w = subject.draws, subject.workload
    name = "out" if "out" in outputs else "dv"
    if name == "dv" and not draws.gradient_heads:
        return
    heads = draws.sample.heads if name == "out" else draws.gradient_heads
    clear = _clear_rows(subject, f"{SCALED}{scale:g}") if name == "out" else None
    for n, (at, truth) in enumerate(zip(heads, draws.truths(f"{SCALED}{scale:g}", name == "dv"))):
        members = slice(at[1] * w.group, (at[1] + 1) * w.group) if name == "out" else slice(at[1], at[1] + 1)
        got = subject.head_rows(outputs[name], at[0], members, draws.sample.rows if name == "out" else None)
        if clear is not None:
            exact, plain = truth.out, truth.plain_out
            _require_clear_rows(subject, scale, at, clear[n], got, exact)
        else:
            assert truth.grads is not None
            assert truth.plain_grads is not None
            exact, plain = truth.grads[2][None], truth.plain_grads[2][None]
        size, off, usual = (np.linalg.norm(x, axis=(1, 2)) for x in (exact, got - exact, plain - exact))
        size = np.where(size > 0, size, 1.0)
        usual = np.where(np.isfinite(usual), usual / size, 1.0)
        allowed = np.minimum(LARGE_FACTOR * usual + LARGE_FLOOR[DTYPE_BYTES[w.dtype]], LARGE_MOST)
        if (over := ~(off / size <= allowed)).any():
            member = int(np.argmax(over))
            raise Wrong(
                f"{name} is wrong for inputs scaled by {scale:g} (large logits): batch {at[0]}, head "
                f"{members.start + member} is off by {off[member] / size[member]:.1e}, {allowed[member]:.1e} allowed"
            )


def _clear_rows(subject: Subject, inputs: str) -> np.ndarray:
    """Return which of the sampled rows are clear, [heads, members, rows]; none with a soft cap, near which all tie."""
    gap, largest = subject.draws.logit_gaps(inputs)
    clear = gap > CLEAR_GAP + CLEAR_ROUNDED * EPS[subject.workload.dtype] * largest
    return clear & (subject.workload.softcap is None)


def _require_clear_rows(
    subject: Subject, scale: float, at: tuple[int, int], clear: np.ndarray, got: np.ndarray, exact: np.ndarray
) -> None:
    """Require that clear rows of one head [members, rows, width], whose weight is all on one key, are right."""
    off, size = (np.linalg.norm(x, axis=-1) for x in (got - exact, exact))
    share = np.where(clear, off / np.maximum(size, typical_row(size)), 0.0)
    allowed = CLEAR_ROW + CLEAR_ULPS * EPS[subject.workload.dtype]
    if (over := ~(share <= allowed)).any():
        member, row = (int(n) for n in np.argwhere(over)[0])
        raise Wrong(
            f"out is wrong for inputs scaled by {scale:g} (large logits): {np.count_nonzero(over)} of "
            f"{np.count_nonzero(clear)} rows in which one key has all the weight, first at batch {at[0]}, head "
            f"{at[1] * subject.workload.group + member}, row {subject.draws.sample.rows[row]} (off by "
            f"{share[member, row]:.1e}, {allowed:.1e} allowed)"
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

Sampled = Callable[[Subject, str, Array], list[np.ndarray]]
"""Outputs of the heads whose truth is known: (subject, name, array) -> [members, rows, width] of each."""


Sets = Mapping[int | str, Mapping[str, Sequence[np.ndarray]]]
"""Input set or probe -> the outputs on it, {name: sampled heads}."""


def check_scale_and_softcap(subject: Subject, outputs: Mapping[str, Sequence[np.ndarray]], sampled: Sampled) -> None:
    """Estimate scale and soft cap from the outputs on the first input set; raises Wrong if one is off.

    `outputs` are the sampled heads by name. More sets are drawn if the first has too few rows or is not of normal
    numbers. Gradients show the soft cap best on logits near it.
    """
    w = subject.workload
    asked = {"scale": (w.softmax_scale, SCALE_OFF)}
    if w.softcap is not None:
        asked["softcap"] = (w.softcap, CAP_OFF)
    sets: Sets = {0: outputs}
    rows = len(subject.draws.sample.heads) * min(w.group * len(subject.draws.sample.rows), w.kv_len)
    if rows < ENOUGH_ROWS or w.inputs != "normal":
        more = min(MOST_SETS, -(-ENOUGH_ROWS // rows))
        sets = {which: _outputs(subject, which, sampled) for which in range(SETS, SETS + more)}
    names = [name for name in outputs if name == "out" or subject.draws.gradient_heads]
    for parameter, (value, off) in asked.items():
        for name in names if value else ():
            _require_estimate(subject, name, parameter, value, off, sets)
    if w.softcap is not None and (gradients := [name for name in names if name != "out"]):
        pointed: Sets = {"pointed": _outputs(subject, "pointed", sampled)}
        for name in gradients:
            _require_estimate(subject, name, "softcap", w.softcap, CAP_OFF, pointed)


def _outputs(subject: Subject, which: int | str, sampled: Sampled) -> dict[str, Sequence[np.ndarray]]:
    fw = subject.framework
    inputs = Inputs(*(fw.transpose(x, "bshd", subject.layout) for x in subject.draws.input_set(which)))
    found = run(subject.programs.main, inputs)
    fw.wait(found)
    return {name: sampled(subject, name, array) for name, array in zip(OUTPUTS[subject.workload.pass_], found)}


def _require_estimate(
    subject: Subject,
    name: str,
    parameter: str,
    value: float,
    off: float,
    sets: Sets,
) -> None:
    at, gradients = ("out", "dq", "dk", "dv").index(name), name != "out"
    errors, usual, slopes = [], [], []
    for which, outputs in sets.items():
        truths = subject.draws.truths(which, gradients)
        for got, truth, slope in zip(
            outputs[name], truths, subject.draws.shifted(which, gradients, STEP, **{parameter: value})
        ):
            exact, plain = (
                (truth.out, truth.plain_out)
                if truth.grads is None or truth.plain_grads is None or not at
                else (truth.grads[at - 1], truth.plain_grads[at - 1])
            )
            errors.append(got.reshape(exact.shape) - exact)
            usual.append(plain - exact)
            slopes.append(slope[at])
    _require_near(f"{name}: as if {parameter} were", errors, usual, slopes, value, off)
    if parameter == "scale":
        _require_each_head(subject, name, errors, usual, slopes, value, off)


def _require_each_head(
    subject: Subject,
    name: str,
    errors: Sequence[np.ndarray],
    usual: Sequence[np.ndarray],
    slopes: Sequence[np.ndarray],
    value: float,
    off: float,
) -> None:
    """Estimate the scale of every sampled head: one wrong head among many moves the estimate over all of them little.

    The arrays, [members, rows, width] or [rows, width], are those of each head on the first set, then on the next.
    """
    heads = subject.draws.sample.heads if name == "out" else subject.draws.gradient_heads
    parts = [[x.reshape(-1, *x.shape[-2:]) for x in arrays] for arrays in (errors, usual, slopes)]
    members = len(parts[0][0])
    count = len(heads) * members
    for n, (batch, index) in enumerate(heads) if count > 1 else ():
        for member in range(members):
            mine, plain, slope = ([x[member] for x in arrays[n :: len(heads)]] for arrays in parts)
            head = f"head {index * members + member}" if name in ("out", "dq") else f"key/value head {index}"
            what = f"{name}: as if in batch {batch}, {head} scale were"
            _require_near(what, mine, plain, slope, value, off, TAIL / count)


def _require_near(
    what: str,
    errors: Sequence[np.ndarray],
    usual: Sequence[np.ndarray],
    slopes: Sequence[np.ndarray],
    value: float,
    off: float,
    tail: float = TAIL,
) -> None:
    mine, plain = estimate(errors, slopes, tail), estimate(usual, slopes, tail)
    limit = off + mine.uncertainty + PLAIN_FACTOR * abs(plain.value)
    if not abs(mine.value) <= limit:
        raise Wrong(
            f"{what} {value * (1 + mine.value):.5g}, not {value:.5g} (off by {100 * mine.value:.2g} %, "
            f"{100 * limit:.2g} % allowed)"
        )


class Estimate(NamedTuple):
    """The share by which a parameter seems off, and how far chance alone may move it."""

    value: float
    uncertainty: float


def estimate(errors: Sequence[np.ndarray], slopes: Sequence[np.ndarray], tail: float = TAIL) -> Estimate:
    """Return the multiple of the slopes [..., rows, width] that fits the errors best; (0, inf) without any slope.

    Errors within a row are not independent, since a rounded logit moves all of it; those of different rows are taken as
    independent.
    """
    error, slope = (np.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays]) for arrays in (errors, slopes))
    weights = np.einsum("ij,ij->i", slope, slope)
    size = float(weights.sum())
    if not size > 0:
        return Estimate(0.0, float("inf"))
    found = float(np.vdot(error, slope)) / size
    rest = np.einsum("ij,ij->i", error - found * slope, slope)
    rows = size**2 / float(weights @ weights)
    if rows < 2:
        return Estimate(found, float("inf"))
    from scipy.special import stdtrit

    return Estimate(found, float(-stdtrit(rows - 1, tail) * np.linalg.norm(rest) / size))
