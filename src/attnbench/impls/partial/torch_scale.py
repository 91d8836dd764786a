"""A positive scale for every kernel: the sign of another scale goes into the queries, and the logits stay the same.

A kernel may multiply by the scale what it has hidden: torch's flash kernel of a CPU does so with `is_causal`, and -inf
times 0 is NaN, times a negative number +inf. Others subtract the largest product of a row before they multiply, which
is the smallest logit if the scale is negative. Negating queries rounds nothing, and needs no mask array.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from attnbench.spec import Array, Call, Partial, Workload


def positive_scale(scale: float) -> tuple[float, float]:
    """Return a positive scale and the factor of the queries, 1, -1 or 0, whose product is the given scale."""
    if scale > 0:
        return scale, 1.0
    return (-scale, -1.0) if scale < 0 else (1.0, 0.0)


def call_at_positive_scale(build: Callable[[Workload], Call], workload: Workload) -> Call:
    """Return the call of a workload by a kernel that `build` builds and that gets a positive scale."""
    scale, factor = positive_scale(workload.softmax_scale)
    if factor == 1.0:
        return build(workload)
    call = build(replace(workload, scale=scale))
    return lambda q, k, v: call(q * factor, k, v)


def pair_at_positive_scale(make: Callable[[Workload], Partial | None], workload: Workload) -> Partial | None:
    """Return the partial form of a workload by kernels that `make` makes and that get a positive scale."""
    scale, factor = positive_scale(workload.softmax_scale)
    if factor == 1.0:
        return make(workload)
    pair = make(replace(workload, scale=scale))
    if pair is None:
        return None
    forward, backward = pair

    def run_backward(q: Array, *rest: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = backward(q * factor, *rest)
        return dq * factor, dk, dv

    return lambda q, k, v: forward(q * factor, k, v), run_backward
