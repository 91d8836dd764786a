"""Arrays as kernels read them: the numbers of a row (the last axis) lie side by side.

A kernel that takes this for granted reads wrong numbers from a view in which they do not, without an error. Whoever
calls such a kernel goes through here.
"""

from __future__ import annotations

from attnbench.spec import Array, Partial


def has_dense_rows(x: Array) -> bool:
    """Whether the last axis has stride 1."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def dense_rows(x: Array) -> Array:
    """Return the array, or a copy of it if its rows are not dense."""
    return x if has_dense_rows(x) else x.contiguous()


def of_dense_rows(pair: Partial) -> Partial:
    """Return the two functions of a partial form, which are handed dense rows whatever they are called with."""
    forward, backward = pair

    def run_forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return forward(dense_rows(q), dense_rows(k), dense_rows(v))

    def run_backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        return backward(dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(out), lse, dense_rows(dout))

    return run_forward, run_backward
