"""Attention sinks: a learned logit per head that joins every row's softmax and has no value.

A row's weights with a sink s are its weights without it, times exp(LSE - LSE'), LSE' = log(exp(LSE) + exp(s)). So any
implementation that returns an LSE computes sinks exactly, and their gradients if one flows through that LSE.
"""

from __future__ import annotations

from typing import Any

from attnbench.errors import InvalidWorkload
from attnbench.spec import Array


def with_sinks(found: Any, sinks: Array, layout: str, return_lse: bool) -> Any:
    """Return the output of rows that the sinks [heads] have joined, and their LSE if asked for, float32.

    `found` is the (out, lse) of the rows without sinks. A row that sees no key gives 0; its LSE is the sink. A sink of
    -inf changes nothing.
    """
    out, lse = found
    _check(out, lse, sinks)
    if hasattr(out, "requires_grad"):
        import torch

        return _joined(torch, out, lse, sinks, layout, return_lse)
    if not hasattr(out, "at"):
        import numpy

        return _joined(numpy, out, lse, sinks, layout, return_lse)
    import jax.numpy

    from attnbench.frameworks.jax.plain import in_usual_promotion

    return in_usual_promotion(lambda *x: _joined(jax.numpy, x[0], x[1], x[2], layout, return_lse))(out, lse, sinks)


def _joined(xp: Any, out: Array, lse: Array, sinks: Array, layout: str, return_lse: bool) -> Any:
    cast, swap = (
        (lambda x, dtype: x.to(dtype), lambda x: x.transpose(1, 2))
        if xp.__name__ == "torch"
        else (lambda x, dtype: x.astype(dtype), lambda x: x.swapaxes(1, 2))
    )
    logit, seen = cast(sinks, lse.dtype)[:, None], lse != -float("inf")
    known = xp.where(seen, lse, 0.0)  # -inf - -inf would be NaN, and so would its gradient
    joined = xp.logaddexp(known, logit)
    share = xp.exp(known - joined)  # of a row that sees no key any number will do: its output is 0
    share = (share if layout == "bhsd" else swap(share))[..., None]
    rows = out.reshape(*out.shape[:2], lse.shape[1], -1) if layout == "packed" else out
    scaled = cast(rows * share, out.dtype).reshape(out.shape)
    return (scaled, cast(xp.where(seen, joined, logit), xp.float32)) if return_lse else scaled


def _check(out: Array, lse: Array, sinks: Array) -> None:
    """Raise InvalidWorkload unless sinks are floats [heads] of the framework and device of q, k and v."""
    kinds = [(hasattr(x, "requires_grad"), hasattr(x, "at"), hasattr(x, "dtype")) for x in (out, sinks)]
    if kinds[0] != kinds[1]:
        raise InvalidWorkload(
            f"sinks must be an array of the framework of q, k and v, not of type {type(sinks).__name__}: convert it."
        )
    if "float" not in str(sinks.dtype):
        raise InvalidWorkload(f"sinks are logits, which are floating-point numbers, not {sinks.dtype}.")
    if tuple(sinks.shape) != (lse.shape[1],):
        raise InvalidWorkload(f"sinks have one number per query head, [{lse.shape[1]}], not {list(sinks.shape)}.")
    if kinds[0][0] and sinks.device != out.device:
        raise InvalidWorkload(f"sinks are on {sinks.device}, but the inputs are on {out.device}: move the sinks.")
