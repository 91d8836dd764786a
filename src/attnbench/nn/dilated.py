"""Dilated attention (LongNet) on projected heads: q, k, v of [b, s, h, d] in, [b, s, h, d] out.

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

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.frameworks.torch_autocast import under_autocast, without_autocast
from attnbench.impls._arguments import check_causal, check_mix_grad, check_scale, check_tensors, workload_of
from attnbench.kernels.dilated.pieces import Task, problem_of
from attnbench.kernels.dilated.torch_function import dilated
from attnbench.tracing import outside_graphs

Lengths = Sequence[int] | torch.Tensor | None


class _Form(NamedTuple):
    """As much of an array as a task depends on."""

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
    """What is asked, read and checked once for all calls that ask the same."""
    parts = [pattern, *([masks.causal()] if causal else []), *([] if lengths is None else [lengths])]
    workload = workload_of(*forms, mask=reduce(and_, parts), scale=scale)
    return Task(problem_of(workload), workload.softmax_scale, detached, **dict(how))


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
        """[b, s, h, d]; keys from kv_lengths[b] on are padding; with `return_lse` also the LSE [b, h, s], float32.

        A row that sees no key is 0 with LSE -inf. A gradient through the LSE costs a second backward pass. Lengths on a
        GPU are waited for. Under autocast the arrays are taken in its dtype, as `ab.attention` takes them.
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
        """The pattern, and what differs from the defaults."""
        options = {"causal": self.causal, "scale": self.scale, "mix_grad": self.mix_grad}
        return ", ".join([self.pattern.id, *(f"{name}={value}" for name, value in options.items())])


class ImprovedDilatedAttention(DilatedAttention):
    """The same numbers without gathered copies: kernels read strided views, and one pass merges their results."""

    engine = "strided"
