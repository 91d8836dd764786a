"""Are scale and soft cap the ones that were asked for? A wrong one moves all results in one known direction: the error
along that direction is an estimate of how wrong it is, and over many elements far sharper than any norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attnbench.frameworks import OUTPUTS, Inputs
from attnbench.spec import Array
from attnbench.verifying.draws import SETS
from attnbench.verifying.subject import Subject, Wrong, run

STEP = 1e-3
SCALE_OFF, CAP_OFF = 0.002, 0.04
"""Shares that a right kernel may seem off by: it may round the scale to 16 bits, which is half of 0.4 %."""
TAIL = 3e-7
"""Chance that a right kernel seems further off: 5 standard errors of many rows, more of few."""
PLAIN_FACTOR = 2
"""Times what the plain implementation seems off by, which is allowed beside that."""
ENOUGH_ROWS, MOST_SETS = 64, 32
"""Rows that an estimate is made of: if one input set has fewer, so many sets are drawn for it at most."""

Sampled = Callable[[Subject, str, Array], list[np.ndarray]]
"""Outputs of the heads whose truth is known: (subject, name, array) -> [members, rows, width] of each."""


Sets = Mapping[int | str, Mapping[str, Sequence[np.ndarray]]]
"""Input set or probe -> the outputs on it, {name: sampled heads}."""


def check(subject: Subject, outputs: Mapping[str, Sequence[np.ndarray]], sampled: Sampled) -> None:
    """Estimate both from the outputs on the first input set, {name: sampled heads}, if that is of normal numbers and
    has enough rows, else on more sets. Of the soft cap in gradients more is seen if logits are near it."""
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
            _require(subject, name, parameter, value, off, sets)
    if w.softcap is not None and (gradients := [name for name in names if name != "out"]):
        pointed: Sets = {"pointed": _outputs(subject, "pointed", sampled)}
        for name in gradients:
            _require(subject, name, "softcap", w.softcap, CAP_OFF, pointed)


def _outputs(subject: Subject, which: int | str, sampled: Sampled) -> dict[str, Sequence[np.ndarray]]:
    fw = subject.framework
    inputs = Inputs(*(fw.transpose(x, "bshd", subject.layout) for x in subject.draws.input_set(which)))
    found = run(subject.programs.main, inputs)
    fw.wait(found)
    return {name: sampled(subject, name, array) for name, array in zip(OUTPUTS[subject.workload.pass_], found)}


def _require(
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
            one = ([x[member] for x in arrays[n :: len(heads)]] for arrays in parts)
            head = f"head {index * members + member}" if name in ("out", "dq") else f"key/value head {index}"
            _require_near(f"{name}: as if in batch {batch}, {head} scale were", *one, value, off, TAIL / count)


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
    """A share by which a parameter seems off, and how far chance alone may move that."""

    value: float
    uncertainty: float


def estimate(errors: Sequence[np.ndarray], slopes: Sequence[np.ndarray], tail: float = TAIL) -> Estimate:
    """Find the multiple of the slopes [..., rows, width] that fits the errors best; (0, inf) without any slope. Errors
    within a row are not independent (a rounded logit moves all of it); those of rows are taken so."""
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
