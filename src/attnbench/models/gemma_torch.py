"""A stack of Gemma blocks in PyTorch, the same as `gemma.Module` with one expert: for comparisons side by side.

Attention is openpi's standard path (`"standard"`), `F.scaled_dot_product_attention` (`"sdpa"`), or an implementation's
name. Weights are float32 and cast to the input's dtype at use, as in JAX; `load` takes the JAX tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attnbench import masks
from attnbench.dispatch.attention import attention
from attnbench.models.gemma_config import Config


def apply_rope(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate the halves of x by float32 angles, and return the result in x's dtype."""
    half = x.shape[-1] // 2
    wavelengths = base ** (torch.arange(half, device=x.device, dtype=torch.float32) * (2.0 / x.shape[-1]))
    angles = (positions[..., None].float() / wavelengths)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / rms(x) * (1 + scale), computed in float32, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + scale)).to(x.dtype)


class Block(nn.Module):
    """A layer of attention and feed-forward, causal or not."""

    def __init__(self, config: Config, causal: bool, impl: str, device: str | None = None) -> None:
        super().__init__()
        self.config, self.causal, self.impl = config, causal, impl
        heads, kv_heads, width, dim = config.num_heads, config.num_kv_heads, config.width, config.head_dim

        def weight(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device) * fan_in**-0.5)

        self.q_einsum = weight(heads, width, dim, fan_in=width)
        self.kv_einsum = weight(2, kv_heads, width, dim, fan_in=width)
        self.attn_vec_einsum = weight(heads, dim, width, fan_in=heads * dim)
        self.gating_einsum = weight(2, width, config.mlp_dim, fan_in=width)
        self.linear = weight(config.mlp_dim, width, fan_in=config.mlp_dim)
        self.pre_attention_norm = nn.Parameter(torch.zeros(width, device=device))
        self.pre_ffw_norm = nn.Parameter(torch.zeros(width, device=device))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        normed = rms_norm(x, self.pre_attention_norm)
        q = torch.einsum("btd,ndh->btnh", normed, self.q_einsum.to(x.dtype))
        k, v = torch.einsum("bsd,ckdh->cbskh", normed, self.kv_einsum.to(x.dtype))
        q = apply_rope(q, positions) * self.config.head_dim**-0.5
        encoded = self._attend(q, apply_rope(k, positions), v)
        x = x + torch.einsum("btnh,nhd->btd", encoded, self.attn_vec_einsum.to(x.dtype))
        normed = rms_norm(x, self.pre_ffw_norm)
        gate, value = (normed @ w.to(x.dtype) for w in self.gating_einsum)
        return x + (functional.gelu(gate, approximate="tanh") * value) @ self.linear.to(x.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.impl == "standard":
            return _standard(q, k, v, self.causal)
        if self.impl == "sdpa":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, scale=1.0, enable_gqa=True
            ).transpose(1, 2)
        return attention(q, k, v, mask=masks.causal() if self.causal else None, scale=1.0, impl=self.impl)


def _standard(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("btkgh,bskh->bkgts", grouped, k).float()
    if causal:
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(hidden, -2.3819763e38)
    return torch.einsum("bkgts,bskh->btkgh", logits.softmax(-1).to(v.dtype), v).flatten(2, 3)


class Stack(nn.Module):
    """Blocks, each recomputed in the backward pass as in openpi, and a final norm."""

    def __init__(self, config: Config, *, causal: bool = True, impl: str = "sdpa", device: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(config, causal, impl, device) for _ in range(config.depth)])
        self.final_norm = nn.Parameter(torch.zeros(config.width, device=device))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, positions, use_reentrant=False) if torch.is_grad_enabled() else layer(x, positions)  # pyright: ignore[reportAssignmentType]
        return rms_norm(x, self.final_norm)

    @torch.no_grad()
    def load(self, params: Mapping[str, Any]) -> None:
        """Load the parameters of a `gemma.Module` with one expert; stacked weights are distributed to the layers."""
        layers = params["layers"]
        stacked = {name: layers["attn"][name]["w"] for name in ("q_einsum", "kv_einsum", "attn_vec_einsum")}
        stacked |= {name: layers["mlp"][name] for name in ("gating_einsum", "linear")}
        stacked |= {name: layers[name]["scale"] for name in ("pre_attention_norm", "pre_ffw_norm")}
        for i, layer in enumerate(self.layers):
            for name, value in stacked.items():
                getattr(layer, name).copy_(torch.from_numpy(np.array(value[i], np.float32)))
        self.final_norm.copy_(torch.from_numpy(np.array(params["final_norm"]["scale"], np.float32)))
