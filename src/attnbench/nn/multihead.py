"""Dilated attention with its projections: x of [b, s, embed_dim] in, [b, s, embed_dim] out.

All variants have the same parameters (`in_proj`: Q, K and V stacked; `out_proj`), so a state dict of one loads in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from attnbench.errors import UsageError
from attnbench.frameworks.torch_autocast import is_autocast
from attnbench.impls._arguments import check_tensors
from attnbench.masks.base import whole_number
from attnbench.nn.dilated import DilatedAttention, ImprovedDilatedAttention, Lengths


class MultiheadDilatedAttention(nn.Module):
    """The plain one: three projections, then `DilatedAttention`."""

    attention_class: type[DilatedAttention] = DilatedAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = True,
        offset: Literal["mod", "group"] = "mod",
        scale: float | None = None,
        mix_grad: Literal["full", "detached"] = "full",
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", kv_heads)):
            if whole_number(value, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        if embed_dim % num_heads:
            raise UsageError(f"embed_dim {embed_dim} is no multiple of num_heads {num_heads}.")
        if num_heads % kv_heads:
            raise UsageError(f"num_kv_heads {kv_heads} does not divide num_heads {num_heads}.")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.widths = (embed_dim, kv_heads * self.head_dim, kv_heads * self.head_dim)
        self.in_proj = nn.Linear(embed_dim, sum(self.widths), bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self.attention = self.attention_class(
            segment_lengths,
            dilation_rates,
            causal=causal,
            offset=offset,
            scale=scale,
            mix_grad=mix_grad,
            dropout=dropout,
        )

    def forward(self, x: torch.Tensor, *, kv_lengths: Lengths = None) -> torch.Tensor:
        """[b, s, embed_dim]; tokens from kv_lengths[b] on are padding that no token sees."""
        return self.out_proj(self.attention(*self.heads_of(x), kv_lengths=kv_lengths).flatten(-2))

    def heads_of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Q, K and V of [b, s, heads, dim]; raises where x does not fit the weights."""
        check_tensors(type(self).__name__, x)
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise UsageError(f"x is [batch, tokens, {self.embed_dim}], not {tuple(x.shape)}.")
        wanted = self.in_proj.weight.dtype
        if x.dtype != wanted and not is_autocast(x.device.type):
            raise UsageError(f"x is {x.dtype} and the weights are {wanted}: cast one of them with .to().")
        return [part.unflatten(-1, (-1, self.head_dim)) for part in self.projected(x)]

    def extra_repr(self) -> str:
        """The sizes; the pattern is told by `attention`."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"

    def projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Q, K and V of [b, s, heads * dim]."""
        weights = self.in_proj.weight.split(self.widths)
        biases = (None,) * 3 if self.in_proj.bias is None else self.in_proj.bias.split(self.widths)
        return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases)]


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """One projection to Q, K and V, whose parts the kernels read where they lie."""

    attention_class = ImprovedDilatedAttention

    def projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Q, K and V as slices of one array."""
        return self.in_proj(x).split(self.widths, -1)
