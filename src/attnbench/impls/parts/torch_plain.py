"""The partial form operator by operator: any mask, soft cap, dtype and device; stores the T x S logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.frameworks.torch_plain import attend, log_sum_exp, mask_tensors, once_per_device, scores
from attnbench.impls.parts.torch_merge import for_backward
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
        out, logits = attend(q, k, v, mask, scale, softcap)
        return out, log_sum_exp(logits, mask, logits.dtype)

    @torch.no_grad()
    def backward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mask = masks(q.device)
        logits = scores(q, k, mask, scale, softcap)
        wide, shape = logits.dtype, logits.shape
        p = torch.exp(logits - for_backward(lse).to(wide).unsqueeze(-1))
        if mask.dead is not None:
            p = p.masked_fill(mask.dead, 0.0)
        shared = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).unsqueeze(-1)
        dp = _stacked(dout, k) @ v.transpose(1, 2).transpose(-2, -1)
        dlogits = p * (dp.reshape(shape).to(wide) - shared) * scale
        if softcap is not None:
            capped = scores(q, k, mask._replace(visible=None, weight=None, dead=None), scale, softcap)
            dlogits = dlogits * (1 - (capped / softcap) ** 2)
        rows = (shape[0], k.shape[2], -1, shape[3])
        dlogits, p = (x.to(q.dtype).reshape(rows) for x in (dlogits, p))
        dq = (dlogits @ k.transpose(1, 2)).reshape(*shape[:3], q.shape[-1])
        dk, dv = dlogits.transpose(-2, -1) @ _stacked(q, k), p.transpose(-2, -1) @ _stacked(dout, k)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return forward, backward


def _stacked(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """bshd -> [b, kv_heads, group * tokens, d]: query heads of one group as rows."""
    batch, tokens, heads, dim = x.shape
    return x.transpose(1, 2).reshape(batch, k.shape[2], heads // k.shape[2] * tokens, dim)
