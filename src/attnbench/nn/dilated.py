"""Dilated attention (LongNet) as torch modules: on projected heads, and with its projections.

Every head runs every branch; branches mix by their softmax denominators, which is one dense softmax whose logits carry
log(count), count = branches in which query and key meet. Any length; k and v may have fewer heads (grouped).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from operator import and_
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.frameworks.torch.internals import is_autocast, under_autocast, without_autocast
from attnbench.impls._arguments import check_causal, check_mix_grad, check_scale, check_tensors, workload_of
from attnbench.kernels.dilated.pieces import Task, problem_of
from attnbench.kernels.dilated.torch_engines import dilated
from attnbench.masks.base import whole_number
from attnbench.tracing import outside_graphs

Lengths = Sequence[int] | torch.Tensor | None


class _Form(NamedTuple):
    """Facts of an array that a task depends on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@lru_cache(maxsize=256)
def _task(
    forms: tuple[_Form, _Form, _Form],
    pattern: masks.Mask,
    causal: bool,
    lengths: masks.Mask | None,
    scale: float | None,
    detached: bool,
    how: tuple[tuple[str, Any], ...],
) -> Task:
    """Check a problem and return it as a task, once for all calls that ask the same."""
    parts = [pattern, *([masks.causal()] if causal else []), *([] if lengths is None else [lengths])]
    workload = workload_of(*forms, mask=reduce(and_, parts), scale=scale)
    return Task(problem_of(workload), workload.softmax_scale, detached, **dict(how))


class DilatedAttention(nn.Module):
    """Dilated attention step by step: gathers each branch's tokens, attends, scatters back, mixes.

    `offset`: "mod" (the paper: head h of rate r starts at h % r) or "group" (torchscale: neighbouring heads share one).
    `mix_grad`: "full" is the derivative; "detached" treats the mixing weights as constants, as torchscale does.
    """

    engine = "gathered"
    how: Mapping[str, Any] = {}
    """Options `kernel` (an implementation's name), `merge` and `diagonal` that override the automatic choice."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        causal: bool = False,
        offset: Literal["mod", "group"] = "mod",
        scale: float | None = None,
        mix_grad: Literal["full", "detached"] = "full",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dropout:
            raise UsageError(
                f"dilated attention supports no dropout of attention weights: leave out dropout={dropout:g}."
            )
        check_mix_grad(mix_grad)
        check_causal(causal)
        check_scale(scale)
        self.pattern = masks.dilated(segment_lengths, dilation_rates, offset)
        self.causal, self.scale = causal, scale
        self.mix_grad: Literal["full", "detached"] = mix_grad

    @outside_graphs
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kv_lengths: Lengths = None, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return [b, s, h, d], with `return_lse` also the LSE [b, h, s], float32; keys >= kv_lengths[b] are padding.

        A row that sees no key is 0 with LSE -inf. A gradient through the LSE costs a second backward pass. Lengths on a
        GPU are copied to the host, which waits. Under autocast the arrays are cast to its dtype, as in `ab.attention`.
        """
        check_tensors(type(self).__name__, q, k, v)
        q, k, v = under_autocast(q, k, v)
        lengths = None if kv_lengths is None else masks.lengths(torch.as_tensor(kv_lengths).cpu().numpy())
        forms = tuple([_Form(x.shape, x.dtype, x.device) for x in (q, k, v)])
        options = (self.causal, lengths, self.scale, self.mix_grad == "detached", tuple(self.how.items()))
        with without_autocast(q.device.type):
            out, lse = dilated(q, k, v, self.engine, _task(forms, self.pattern, *options))
        return (out, lse.float()) if return_lse else out

    def extra_repr(self) -> str:
        options = {"causal": self.causal, "scale": self.scale, "mix_grad": self.mix_grad}
        return ", ".join([self.pattern.id, *(f"{name}={value}" for name, value in options.items())])


class ImprovedDilatedAttention(DilatedAttention):
    """Dilated attention without gathered copies: kernels read strided views, and one pass merges their results."""

    engine = "strided"


class MultiheadDilatedAttention(nn.Module):
    """Three projections of x [b, s, embed_dim], then `DilatedAttention`, then the output projection.

    All variants have the same parameters (`in_proj`: Q, K and V stacked; `out_proj`): a state dict of one loads in all.
    """

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
            raise UsageError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}.")
        if num_heads % kv_heads:
            raise UsageError(f"num_kv_heads {kv_heads} does not divide num_heads {num_heads}.")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.widths = (embed_dim, kv_heads * self.head_dim, kv_heads * self.head_dim)
        self.in_proj = nn.Linear(embed_dim, sum(self.widths), bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        options = {"causal": causal, "offset": offset, "scale": scale, "mix_grad": mix_grad, "dropout": dropout}
        self.attention = self.attention_class(segment_lengths, dilation_rates, **options)

    def forward(self, x: torch.Tensor, *, kv_lengths: Lengths = None) -> torch.Tensor:
        """Return [b, s, embed_dim]; tokens from kv_lengths[b] on are padding that no token sees."""
        return self.out_proj(self.attention(*self.heads_of(x), kv_lengths=kv_lengths).flatten(-2))

    def heads_of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return Q, K and V of [b, s, heads, dim]; raise if x does not fit the weights."""
        check_tensors(type(self).__name__, x)
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise UsageError(f"x must be [batch, tokens, {self.embed_dim}], not {tuple(x.shape)}.")
        wanted = self.in_proj.weight.dtype
        if x.dtype != wanted and not is_autocast(x.device.type):
            raise UsageError(f"x is {x.dtype}, but the weights are {wanted}: cast one of them with .to().")
        return [part.unflatten(-1, (-1, self.head_dim)) for part in self.projected(x)]

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"

    def projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return Q, K and V of [b, s, heads * dim]."""
        weights = self.in_proj.weight.split(self.widths)
        biases = (None,) * 3 if self.in_proj.bias is None else self.in_proj.bias.split(self.widths)
        return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases)]


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """One projection to Q, K and V, whose parts the kernels read in place."""

    attention_class = ImprovedDilatedAttention

    def projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.in_proj(x).split(self.widths, -1)
