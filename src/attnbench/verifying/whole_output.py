"""Comparison of every row of every head with near-exact results, on the first input set and on the probes.

As far as the budget of `Draws.covered` goes; see attnbench.verifying.probes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from attnbench.masks import Alibi, Dense, Mask
from attnbench.spec import Array, Errors
from attnbench.verifying import probes
from attnbench.verifying.draws import Heads
from attnbench.verifying.subject import LONG_NAMES, Examination, Subject, Wrong
from attnbench.verifying.tolerance import EPS, first_over, rounded_terms, row_errors, typical_row
from attnbench.verifying.truths import Whole

KEY_SHARE, KEY_ULPS, KEY_SUMS = 0.03, 2, 1e-7
"""Allowed error of a row of `counted`: a share of one key's weight, ulp of the row itself, and what sums in float32
lose per key."""
PAIR_SHARE, PAIR_ULPS, PAIR_NOISE = 0.2, 0.5, 3
"""Allowed error of an element of a gradient of `counted_pairs`: a share of one pair's weight, ulp of the element
itself, and ulp of the root mean square of its row, since every pair is rounded before it is added."""
POINTED_ULPS, POINTED_PER_LOGIT, POINTED_FLOOR, POINTED_ROW = 3, 0.25, 1e-3, 0.5
"""Allowed errors of `pointed` results: as a whole, ulp, more of them for larger logits, which a plain implementation
rounds too; and of one row, a share of it or of a typical one, plus as much for its logits."""
POINTED_TERMS = 3
"""Multiple of what rounding may leave of terms that cancel: nearly all weight lies on one key, and a plain
implementation rounds weights and their gradients too."""
STEEP_ROW = 0.1
"""Allowed error of a row of dV of `steep` inputs, as a share of it or of their root mean square: float32 rounds an LSE
near 65,000 to 0.004."""
COUNTED = ("counted", "shifted", "steep")
"""Inputs whose output is judged by the weight of one key."""
MORE_ROWS, MISSING, LEAST_ROW = 2, 0.75, 5e-4
"""Multiple of a sampled row's allowed error, since the worst of many more rows is worse; the error by which a row is
another one; and the least allowed error of a row."""
SMALLEST, UNDERFLOWS = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}, 4
"""Smallest numbers that every device computes with (of float16, in float32), and multiple of them that is allowed."""
ALIKE_WEIGHTS = 8
"""Ratio of the weights of two visible keys of a row up to which pairs can be counted."""


class RowNorms(NamedTuple):
    """Norms of the compared rows of one output, [heads, members, rows]."""

    size: np.ndarray
    off: np.ndarray
    least: np.ndarray
    """Size against which a row's error is measured at least."""


def check_first(examination: Examination) -> tuple[str, ...]:
    """Compare the outputs on the first input set with near-exact ones, row by row; return no property."""
    subject, limits = examination.subject, examination.limits
    for name, rows in _compared(subject, "first", examination.outputs).items():
        allowed = max(min(MORE_ROWS * limits[name].row, MISSING), LEAST_ROW)
        share = row_errors(rows.off, rows.size, rows.least, subject.workload.dtype)
        _require(subject, f"{LONG_NAMES[name]} (all rows)", name, share, allowed)
    return ()


def check_counted(examination: Examination) -> tuple[str, ...]:
    """Check on `counted` inputs that no row is off by more than a share of one key's weight; return the property."""
    subject = examination.subject
    if subject.workload.pass_ == "backward":
        return ()
    for name, words in (("counted", "keys counted"), ("shifted", "keys counted, logits of 0 and below")):
        out = subject.outputs(name)["out"]
        same = name == "counted" or subject.workload.softcap is None
        require_counted(subject, out, f"output ({words})", "counted" if same else name)
    return ("one key more or less",)


def check_steep(examination: Examination) -> tuple[str, ...]:
    """Check on `steep` inputs that rows are off by less than a share of one key's weight, rows of dV by less than a
    tenth.

    Nothing is checked if a soft cap makes all their logits alike.
    """
    subject = examination.subject
    if not probes.can_be_steep(subject.workload):
        return ()
    outputs = subject.outputs("steep")
    if not all(subject.framework.is_finite(array) for array in outputs.values()):
        raise Wrong("unstable: NaN or Inf if all logits lie far below 0, where the reference is finite")
    words = "(all logits far below 0)"
    for name, rows in _compared(subject, "steep", {n: outputs[n] for n in ("out", "dv") if n in outputs}).items():
        if name == "out":
            _require_keys(subject, rows, f"output {words}")
            continue
        mean = float(np.sqrt(np.mean(rows.size * rows.size))) or 1.0
        share = rows.off / np.maximum(rows.size, mean)
        _require(subject, f"{LONG_NAMES[name]} {words}", name, share, STEEP_ROW)
    return ("logits far below 0",)


def require_counted(subject: Subject, out: Array, what: str, inputs: str = "counted") -> None:
    """Require that the output on counted inputs is right to a share of one key's weight."""
    _require_keys(subject, _compared(subject, inputs, {"out": out})["out"], what)


def _require_keys(subject: Subject, rows: RowNorms, what: str) -> None:
    """Require that no row is off by more than a share of one key's weight."""
    unit = np.where(rows.least > 0, rows.least, 1.0)
    sums = KEY_SUMS * subject.workload.kv_len
    allowed = KEY_SHARE + sums + KEY_ULPS * EPS[subject.workload.dtype] * rows.size / unit
    _require(subject, what, "out", rows.off / unit, allowed, " of one key's weight")


def weights_differ(mask: Mask) -> bool:
    """Return whether a bias may make a key weigh more than ALIKE_WEIGHTS times as much as another."""
    if any(isinstance(part, Alibi) for part in mask.split()):
        return True
    dense = [part.values.array for part in mask.split() if isinstance(part, Dense) and part.weighted]
    finite = [values[np.isfinite(values)] for values in dense]
    return sum(float(np.ptp(values)) for values in finite if values.size) > log(ALIKE_WEIGHTS)


def check_counted_pairs(examination: Examination) -> tuple[str, ...]:
    """Check on `counted_pairs` inputs that no element of a gradient is off by the weight of one pair; return the
    property.

    Nothing is checked if the pass has no gradients, none fit the budget, or head_dim is 1.
    """
    subject = examination.subject
    w, draws = subject.workload, subject.draws
    if not w.needs_gradients or not draws.covered(True).heads or w.head_dim < 2 or not w.softmax_scale:
        return ()
    outputs = subject.outputs("counted_pairs")
    weight, ulp = probes.pair_weight(draws.reached_keys), EPS[w.dtype]
    shares: dict[str, list[np.ndarray]] = {name: [] for name in ("dq", "dk", "dv")}
    for heads, truth in draws.whole("counted_pairs", True):
        assert truth.grads is not None
        for (name, found), right in zip(shares.items(), truth.grads):
            mine = _heads(subject, outputs[name], name, heads)
            right = subject.host(right) if isinstance(mine, np.ndarray) else right
            right = right if name == "dq" else right[:, None]
            xp = array_api_compat.array_namespace(mine)
            size = xp.abs(right)
            noise = xp.sqrt(2 * xp.mean(size * size, axis=-1, keepdims=True))
            allowed = PAIR_SHARE * weight + ulp * (PAIR_ULPS * size + PAIR_NOISE * noise)
            found.append(subject.host(xp.max(xp.abs(mine - right) / allowed, axis=-1)))
    for name, found in shares.items():
        what, of = f"{LONG_NAMES[name]} (pairs counted)", " times what rounding explains"
        _require(subject, what, name, np.concatenate(found), 1.0, of)
    return ("one pair more or less",)


def check_pointed(examination: Examination) -> tuple[str, ...]:
    """Check on `pointed` inputs, each row of which depends on one pair, that gradients are right in every row.

    Nothing is checked if the pass has no gradients or none fit the budget.
    """
    subject = examination.subject
    if not subject.draws.covered(True).heads or not subject.workload.needs_gradients:
        return ()
    outputs = subject.outputs("pointed")
    ulp = EPS[subject.workload.dtype]
    logits = POINTED_PER_LOGIT * ulp * probes.pointed_logit(subject.workload)
    limit = POINTED_FLOOR + POINTED_ULPS * ulp + logits
    for name, rows in _compared(subject, "pointed", outputs).items():
        what = f"{LONG_NAMES[name]} (queries that point at edges)"
        terms = POINTED_TERMS * rows.least
        share = rows.off / np.maximum(np.maximum(rows.size, typical_row(rows.size)), terms)
        _require(subject, what, name, share, POINTED_ROW + logits)
        size = float(np.linalg.norm(rows.size)) or 1.0
        relative, allowed = (float(np.linalg.norm(x)) / size for x in (rows.off, terms))
        if not relative <= limit + allowed:
            times = relative / (limit + allowed)
            raise Wrong(
                f"{what}: {times:.1f} x the relative error allowed ({relative:.2e} against {limit + allowed:.2e})",
                Errors(backward=relative, backward_allowed=limit + allowed),
            )
    return ("gradients at edges",)


def _compared(subject: Subject, inputs: str, outputs: Mapping[str, Array]) -> dict[str, RowNorms]:
    """Return the norms of all covered rows of each output that has some."""
    found: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in outputs}
    backward = [name for name in outputs if name != "out"]
    together = not backward or subject.draws.covered(True) is subject.draws.covered(False)
    passes = [(bool(backward), list(outputs))] if together else [(False, ["out"]), (True, backward)]
    for gradients, names in passes:
        sample = subject.draws.covered(gradients)
        names = [name for name in names if name in outputs]
        for heads, truth in subject.draws.whole(inputs, gradients) if names else ():
            for name in names:
                mine = _heads(subject, outputs[name], name, heads)
                if name == "out" and len(sample.rows) < subject.workload.q_len:
                    mine = mine[:, :, sample.rows]
                found[name].append(_norms(subject, name, mine, truth, inputs))
    return {name: RowNorms(*(np.concatenate(parts) for parts in zip(*norms))) for name, norms in found.items() if norms}


def _heads(subject: Subject, array: Array, name: str, heads: Heads) -> Array:
    """Return [n, members, rows, width] of key/value heads: NumPy on a CPU and in float64, else on the device."""
    part = subject.heads(name, array, heads)
    on_host = subject.device == "cpu" or subject.workload.dtype == "float64"
    return subject.host(part) if on_host else subject.framework.cast(part, "float32")


def _norms(subject: Subject, name: str, mine: Array, truth: Whole, inputs: str) -> tuple[np.ndarray, ...]:
    if name == "out":
        right, least = truth.out, None
    else:
        assert truth.grads is not None
        assert truth.cancelling_grads is not None
        right = truth.grads[("dq", "dk", "dv").index(name)]
        terms: dict[str, Any] = dict(zip(("dq", "dk"), truth.cancelling_grads))
        least = terms.get(name)
        if name != "dq":
            right, least = right[:, None], None if least is None else least[:, None]
    right = subject.host(right) if isinstance(mine, np.ndarray) else right
    size, off = (subject.host(_row_norms(x)) for x in (right, mine - right))
    if least is not None:
        floor = rounded_terms(subject.host(least), subject.workload.dtype, right.shape[-1])
    elif name == "out" and inputs in COUNTED:
        floor = subject.host(truth.top) * subject.workload.value_dim**0.5
    else:
        floor = np.zeros_like(size)
    return size, off, floor if name == "out" else np.maximum(floor, _underflow(subject, name, inputs))


def _underflow(subject: Subject, name: str, inputs: str) -> float:
    """Return what a row of a gradient may lose because a dtype has no smaller numbers: each weight of the sum that the
    row is, and each element of the row itself, is a multiple of the smallest one."""
    w, draws = subject.workload, subject.draws
    given = draws.input_set(0 if inputs == "first" else inputs)
    other, terms, scale = {
        "dq": (given.k, w.kv_len, w.softmax_scale),
        "dk": (given.q, w.q_len * w.group, w.softmax_scale),
        "dv": (given.dout, w.q_len * w.group, 1.0),
    }[name]
    values = subject.host(other).astype(np.float32)
    most = float(np.abs(values).max())
    size = most * float(np.sqrt(np.mean(np.square(values / most)))) if most else 0.0
    return UNDERFLOWS * SMALLEST[w.dtype] * other.shape[-1] ** 0.5 * (abs(scale) * size * terms**0.5 + 1)


def _row_norms(array: Array) -> Array:
    xp = array_api_compat.array_namespace(array)
    return xp.sqrt(xp.sum(array * array, axis=-1))


def _require(
    subject: Subject, what: str, name: str, share: np.ndarray, allowed: np.ndarray | float, of: str = ""
) -> None:
    if (differs := first_over(share, allowed)) is None:
        return
    which, member, row = differs.place
    sample = subject.draws.covered(share.shape[0] != len(subject.draws.covered(False).heads))
    raise Wrong(
        f"{what}: {np.count_nonzero(~(share <= allowed))} of {share.size} rows are wrong, first at "
        f"{subject.place(name, sample.heads[which], member)}, row {sample.rows[row] if name == 'out' else row} "
        f"(off by {differs.share:.1e}{of}, {differs.allowed:.1e} allowed)"
    )
