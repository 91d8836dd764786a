"""Partial attention in torch: input layouts and scales that kernels need, merging of parts, and a plain partial form.

The plain form takes any mask, soft cap, dtype and device, and stores the q_len x kv_len logits. It computes in float32
(float64 for float64): logits rounded to 16 bits do not match an LSE of exact logits, as exp(logits - lse) shows if
logits are large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attnbench.frameworks.torch.plain import attend, log_sum_exp, mask_tensors, once_per_device, scores
from attnbench.spec import Array, Call, Partial, Workload

if TYPE_CHECKING:
    import torch


def has_dense_rows(x: Array) -> bool:
    """Return whether the numbers of a row lie side by side in memory (the last axis has stride 1)."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def dense_rows(x: Array) -> Array:
    """Return the array, or a copy if its rows are not dense.

    A kernel that assumes dense rows reads wrong numbers from other views, without an error.
    """
    return x if has_dense_rows(x) else x.contiguous()


def with_dense_rows(pair: Partial) -> Partial:
    """Return the two functions of a partial form wrapped so that they get dense rows."""
    forward, backward = pair

    def run_backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        return backward(dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(out), lse, dense_rows(dout))

    return lambda q, k, v: forward(dense_rows(q), dense_rows(k), dense_rows(v)), run_backward


def positive_scale(scale: float) -> tuple[float, float]:
    """Return a positive scale and the factor of the queries, 1, -1 or 0, whose product is the given scale.

    A kernel may multiply hidden logits by the scale: torch's flash kernel of a CPU does so with `is_causal`, and -inf
    times 0 is NaN, times a negative number +inf. Others subtract the largest product of a row before they multiply,
    which is the smallest logit if the scale is negative. Negating queries rounds nothing and needs no mask array.
    """
    return (scale, 1.0) if scale > 0 else (-scale, -1.0) if scale < 0 else (1.0, 0.0)


def call_at_positive_scale(build: Callable[[Workload], Call], workload: Workload) -> Call:
    """Return the call of a workload by a kernel that `build` builds for a positive scale."""
    scale, factor = positive_scale(workload.softmax_scale)
    if factor == 1.0:
        return build(workload)
    call = build(replace(workload, scale=scale))
    return lambda q, k, v: call(q * factor, k, v)


def pair_at_positive_scale(make: Callable[[Workload], Partial | None], workload: Workload) -> Partial | None:
    """Return the partial form of a workload by kernels that `make` makes for a positive scale."""
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


NEGATIVE_INFINITY = float("-inf")


def nothing_yet(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of no parts: out [b, t, h, d] of zeros and lse [b, h, t] of -inf, in float32 or float64."""
    import torch

    batch, tokens, heads, _ = shape
    wide = torch.promote_types(dtype, torch.float32)
    lse = torch.full((batch, heads, tokens), NEGATIVE_INFINITY, dtype=wide, device=device)
    return torch.zeros(shape, dtype=wide, device=device), lse


def merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a part into `out` [b, t, h, d] and `lse` [b, h, t] in place; they may be views of some rows and heads.

    Outputs are weighted by their softmax denominators, LSEs are added in log space; a row that no part has seen stays 0
    with LSE -inf.
    """
    import torch

    both = torch.logaddexp(lse, part_lse)
    # exp(-inf - (-inf)) would be NaN; a row unseen so far has both weights 0.
    base = both.masked_fill(both == NEGATIVE_INFINITY, 0.0)
    kept, added = (torch.exp(x - base).transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(kept).addcmul_(part_out.to(out.dtype), added)
    lse.copy_(both)


def for_backward(lse: torch.Tensor) -> torch.Tensor:
    """Return the LSE with +inf for rows that see nothing, so that exp(s - lse) is 0 there in a backward pass."""
    return lse.masked_fill(lse == NEGATIVE_INFINITY, float("inf"))


def plain_partial(workload: Workload) -> Partial:
    """Return (forward, backward) of the workload in bshd."""
    import torch

    masks = once_per_device(lambda device: mask_tensors(workload, device))
    scale, softcap = workload.softmax_scale, workload.softcap

    @torch.no_grad()
    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        mask = masks(q.device)
        out, logits = attend(_wide(q), _wide(k), _wide(v), mask, scale, softcap)
        return out.to(q.dtype), log_sum_exp(logits, mask)

    @torch.no_grad()
    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        mask, dtype = masks(q.device), q.dtype
        q, k, v, out, dout = (_wide(x) for x in (q, k, v, out, dout))
        logits = scores(q, k, mask, scale, softcap)
        shape = logits.shape
        p = torch.exp(logits - for_backward(lse).to(logits.dtype).unsqueeze(-1))
        if mask.dead is not None:
            p = p.masked_fill(mask.dead, 0.0)
        shared = (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1)
        dp = _stacked(dout, k) @ v.transpose(1, 2).transpose(-2, -1)
        dlogits = p * (dp.reshape(shape) - shared) * scale
        if softcap is not None:
            capped = scores(q, k, mask._replace(visible=None, weight=None, dead=None), scale, softcap)
            dlogits = dlogits * (1 - (capped / softcap) ** 2)
        rows = (shape[0], k.shape[2], -1, shape[3])
        dlogits, p = dlogits.reshape(rows), p.reshape(rows)
        dq = (dlogits @ k.transpose(1, 2)).reshape(*shape[:3], q.shape[-1])
        dk, dv = dlogits.transpose(-2, -1) @ _stacked(q, k), p.transpose(-2, -1) @ _stacked(dout, k)
        dq, dk, dv = (x.transpose(1, 2).to(dtype) for x in (dq, dk, dv))
        return dq, dk, dv

    return forward, backward


def _wide(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stacked(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return bshd as [b, kv_heads, group * tokens, d]: the query heads of a group as rows."""
    batch, tokens, heads, dim = x.shape
    return x.transpose(1, 2).reshape(batch, k.shape[2], heads // k.shape[2] * tokens, dim)
