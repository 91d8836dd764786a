"""The partial form operator by operator: any mask, soft cap, dtype and device; stores the T x S logits.

Everything is computed in float32 (float64 for float64): an LSE of exact logits and logits rounded to 16 bits do not go
together, as exp(logits - lse) shows when logits are large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.frameworks.torch.plain import attend, log_sum_exp, mask_tensors, once_per_device, scores
from attnbench.impls.partial.torch_merge import for_backward
from attnbench.spec import Partial, Workload

if TYPE_CHECKING:
    import torch


def plain_partial(workload: Workload) -> Partial:
    """(forward, backward) of the workload, bshd."""
    import torch

    masks = once_per_device(lambda device: mask_tensors(workload, device))
    scale, softcap = workload.softmax_scale, workload.softcap

    @torch.no_grad()
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = masks(q.device)
        out, logits = attend(_wide(q), _wide(k), _wide(v), mask, scale, softcap)
        return out.to(q.dtype), log_sum_exp(logits, mask, logits.dtype)

    @torch.no_grad()
    def backward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    """bshd -> [b, kv_heads, group * tokens, d]: query heads of one group as rows."""
    batch, tokens, heads, dim = x.shape
    return x.transpose(1, 2).reshape(batch, k.shape[2], heads // k.shape[2] * tokens, dim)
