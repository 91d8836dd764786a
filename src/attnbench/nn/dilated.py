"""Dilated attention (LongNet) on projected heads: q, k, v of [b, s, h, d] in, [b, s, h, d] out.

Every head runs every branch; branches mix by their softmax denominators, which is one dense softmax whose logits carry
log(count), count = branches in which query and key meet. Any length; k and v may have fewer heads (grouped).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, Literal

import torch
from torch import nn

from attnbench.dispatch.arrays import workload_of
from attnbench.errors import UsageError
from attnbench.impls.dilated.conditions import problem_of
from attnbench.impls.dilated.task import Task
from attnbench.impls.dilated.torch_function import dilated
from attnbench.workloads import masks

Lengths = Sequence[int] | torch.Tensor | None


class DilatedAttention(nn.Module):
    """The plain one: copies each branch's tokens out, attends, scatters back, mixes.

    `offset`: "mod" (the paper: head h of rate r starts at h % r) or "group" (torchscale: neighbouring heads share one).
    `mix_grad`: "full" is the derivative; "detached" takes the mixing weights for constants, as torchscale does.
    """

    engine = "gathered"
    how: Mapping[str, Any] = {}
    """`kernel` (an implementation's name), `merge` and `diagonal`, where the automatic choice is not wanted."""

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
            raise UsageError(f"dilated attention has no dropout on its weights: leave out dropout={dropout:g}.")
        if mix_grad not in ("full", "detached"):
            raise UsageError(f'mix_grad is "full" or "detached" (torchscale), not "{mix_grad}".')
        self.pattern = masks.dilated(segment_lengths, dilation_rates, offset)
        self.causal, self.scale, self.mix_grad = causal, scale, mix_grad

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kv_lengths: Lengths = None, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[b, s, h, d]; keys from kv_lengths[b] on are padding; with `return_lse` also the LSE [b, h, s], float32.

        A row that sees no key is 0 with LSE -inf. No gradient flows through the LSE. Lengths on a GPU are waited for.
        """
        parts: list[masks.Mask] = [self.pattern]
        parts += [masks.causal()] if self.causal else []
        parts += [] if kv_lengths is None else [masks.lengths(torch.as_tensor(kv_lengths).cpu().numpy())]
        mask = reduce(and_, parts)
        workload = workload_of(q, k, v, mask=mask, scale=self.scale)  # pyright: ignore[reportArgumentType]
        task = Task(problem_of(workload), workload.softmax_scale, self.mix_grad == "detached", **self.how)
        out, lse = dilated(q, k, v, self.engine, task)
        return (out, lse.float()) if return_lse else out

    def extra_repr(self) -> str:
        """The pattern, and what differs from the defaults."""
        options = {"causal": self.causal, "scale": self.scale, "mix_grad": self.mix_grad}
        return ", ".join([self.pattern.id, *(f"{name}={value}" for name, value in options.items())])


class ImprovedDilatedAttention(DilatedAttention):
    """The same numbers without gathered copies: kernels read strided views, and one pass merges their results."""

    engine = "strided"
