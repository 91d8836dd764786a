"""Packed sequences by torch's own function, `torch.nn.attention.varlen.varlen_attn`: its flash kernel.

It is one operator with a backward operator, so torch.compile traces it. Its LSE is [heads, tokens], +inf for a row that
sees no key, and has no gradient. A window of (-1, 0) is causal. Later releases want grouped heads announced.
"""

from __future__ import annotations

import inspect
from typing import Any

from attnbench.impls.torch._masks import bounds, natural_lse
from attnbench.masks.device import MaskForm
from attnbench.spec import Array, ValuesCall, Workload


def varlen_call(workload: Workload, form: MaskForm, with_lse: bool) -> ValuesCall:
    """Return a call (q, k, v, *values) of arrays [tokens, heads, dim]."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    taken = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": workload.softmax_scale}
    left, right = (-1 if side is None else side for side in bounds(workload))
    options["window_size"] = (left, right)
    if workload.group > 1 and "enable_gqa" in taken:
        options["enable_gqa"] = True
    if with_lse:
        options["return_aux"] = AuxRequest(lse=True)
    same = form.same_offsets

    def call(q: Array, k: Array, v: Array, *values: Any) -> Any:
        *offsets, q_longest, k_longest = values
        result = varlen_attn(q, k, v, offsets[0], offsets[0 if same else 1], q_longest, k_longest, **options)
        return (result[0], natural_lse(result[1])) if with_lse else result

    return call
