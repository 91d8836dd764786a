"""`ab.decode` in graphs of torch: the operator `attnbench::decode`, which chooses when it runs. Needs torch.

Lengths and block table are its tensors, so one graph serves all of them.
"""

from __future__ import annotations

import torch

from attnbench.dispatch.decode import DecodeWords, on_tensors


@torch.library.custom_op("attnbench::decode", mutates_args=())
def operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor | None,
    scale: float | None, softcap: float | None, window: int | None, impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out [b, n, h, d] and the LSE [b, h, n] in float32."""
    out, lse = on_tensors(q, k, v, lengths, block_table, DecodeWords(scale, softcap, window, impl))
    return out.contiguous(), lse.contiguous()


@operator.register_fake
def _empty(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor | None,
    scale: float | None, softcap: float | None, window: int | None, impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3])), q.new_empty((batch, heads, queries), dtype=torch.float32)
