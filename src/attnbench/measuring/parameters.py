"""Are scale and soft cap the ones that were asked for? A wrong one moves all results in one known direction: the error
along that direction is an estimate of how wrong it is, and over many elements far sharper than any norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attnbench.measuring.subject import Subject, Wrong

STEP = 1e-3
SCALE_OFF, CAP_OFF = 0.002, 0.04
"""Shares that a right kernel may seem off by: it may round the scale to 16 bits, which is half of 0.4 %."""
DEVIATIONS = 5
"""So many standard errors of the estimate are allowed beside that."""


def check(subject: Subject, outputs: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Estimate both from the outputs on the first input set, {name: sampled heads}."""
    w, draws = subject.workload, subject.draws
    asked = {"scale": (w.softmax_scale, SCALE_OFF)}
    if w.softcap is not None:
        asked["softcap"] = (w.softcap, CAP_OFF)
    for parameter, (value, off) in asked.items():
        if not value:
            continue
        for gradients in (False, True):
            names = tuple(name for name in outputs if (name != "out") == gradients)
            if not names or (gradients and not draws.gradient_heads):
                continue
            slopes = draws.shifted(0, gradients, STEP, **{parameter: value})
            truths = draws.truths(0, gradients)
            for name in names:
                at = ("out", "dq", "dk", "dv").index(name)
                exact = [t.out if t.grads is None or not at else t.grads[at - 1] for t in truths]
                errors = [got.reshape(right.shape) - right for got, right in zip(outputs[name], exact)]
                found, deviation = estimate(errors, [slope[at] for slope in slopes])
                limit = off + DEVIATIONS * deviation
                if not abs(found) <= limit:
                    raise Wrong(
                        f"{name}: as if {parameter} were {value * (1 + found):.5g}, not {value:.5g} (off by "
                        f"{100 * found:.2g} %, {100 * limit:.2g} % allowed)"
                    )


def estimate(errors: Sequence[np.ndarray], slopes: Sequence[np.ndarray]) -> tuple[float, float]:
    """The multiple of the slopes [..., rows, width] that fits the errors best, and its standard error; (0, inf) without
    any slope. Errors within a row are not independent (a rounded logit moves all of it); those of rows are taken so."""
    error, slope = (np.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays]) for arrays in (errors, slopes))
    size = float(np.vdot(slope, slope))
    if not size > 0:
        return 0.0, float("inf")
    found = float(np.vdot(error, slope)) / size
    rest = np.einsum("ij,ij->i", error - found * slope, slope)
    return found, float(np.linalg.norm(rest)) / size
