"""FlashInfer's batch prefill over ragged keys and values, planned once per device, forward only.

Arrays go in as [batch x tokens, heads, dim] (its NHD), a view of bshd. Its traps: the plan assumes float16 inputs
unless dtypes are given; the LSE is to base 2, laid out [tokens, heads]; a row that sees no key gets a finite LSE or NaN
by version; a window has a left side only, the right one being causal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from attnbench.impls import WithLse, conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.torch._masks import bounds, is_windowed, needs_bottom_right, needs_bounds, needs_visible_rows
from attnbench.spec import Array, Call, Config, Environment, Workload

WORKSPACE_BYTES = 128 << 20
"""Size that the library's documentation recommends for split-k results."""
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))


class Flashinfer(WithLse):
    """FlashInfer's batch prefill over ragged keys and values, with all batch rows of one length; forward only, 16
    bits."""

    name = "torch.flashinfer"
    framework = "torch"
    process = "flashinfer"
    untested = ("cuda",)

    def available(self, environment: Environment) -> str | None:
        return first_reason(
            conditions.needs_device(environment, "cuda"),
            conditions.needs_package("flashinfer", "pip install flashinfer-python"),
            conditions.needs_capability(environment, (7, 5)),
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        dims = workload.head_dim, workload.value_dim
        return first_reason(
            conditions.needs_forward(workload),
            conditions.needs_dtype(workload, "float16", "bfloat16"),
            conditions.needs_bfloat16(workload, environment),
            needs_bounds(workload),
            needs_bottom_right(workload),
            needs_visible_rows(workload),
            conditions.needs_positive_scale(workload),
            "has only causal windows (right = 0)" if is_windowed(workload) and bounds(workload)[1] != 0 else None,
            None if dims in HEAD_DIMS else f"takes head_dim 64, 128, 256 or 192/128, not {dims[0]}/{dims[1]}",
        )

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        wrapper_for, rows = _planner(workload), (workload.batch, workload.q_len)

        def run(q: Array, k: Array, v: Array) -> Any:
            result = wrapper_for(q.device).run(*(array.flatten(0, 1) for array in (q, k, v)), return_lse=with_lse)
            if not with_lse:
                return result.unflatten(0, rows)
            out, lse = result
            return out.unflatten(0, rows), (lse * math.log(2)).unflatten(0, rows).transpose(1, 2).float()

        return run


def _planner(workload: Workload) -> Callable[[Any], Any]:
    """Return a function from a device to a wrapper, which is planned at the first arrays on the device and kept."""
    wrapper_class = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper

    @cache
    def planned(device: Any) -> Any:
        import torch

        left, right = bounds(workload)
        rows = torch.arange(workload.batch + 1, dtype=torch.int32, device=device)
        wrapper = wrapper_class(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")
        wrapper.plan(
            rows * workload.q_len,
            rows * workload.kv_len,
            workload.heads,
            workload.kv_heads,
            workload.head_dim,
            head_dim_vo=workload.value_dim,
            causal=right == 0,
            window_left=-1 if left is None else left,
            logits_soft_cap=workload.softcap,
            sm_scale=workload.softmax_scale,
            q_data_type=getattr(torch, workload.dtype),
            kv_data_type=getattr(torch, workload.dtype),
        )
        return wrapper

    return planned


FLASHINFER = Flashinfer()
