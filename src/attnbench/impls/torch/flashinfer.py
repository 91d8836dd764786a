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
from attnbench.spec import Array, CacheCall, Call, Config, Environment, Workload

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

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        """Return a call that plans anew each time: the library plans on the host, so every call waits for the lengths.

        A cache in one piece is one with a page for each sequence.
        """
        wrapper_class = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        queries = workload.q_len

        @cache
        def wrapper_on(device: Any) -> Any:
            import torch

            return wrapper_class(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")

        def call(q: Array, k: Array, v: Array, lengths: Array, table: Array | None) -> tuple[Array, Array]:
            import torch

            size, known = k.shape[1], lengths.cpu()
            count = (known + size - 1) // size
            pages = known.new_tensor(range(len(known)))[:, None] if table is None else table.cpu()
            listed = pages[torch.arange(pages.shape[1]) < count[:, None]]
            begin, rows = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (count, known * 0 + queries))
            wrapper = wrapper_on(q.device)
            wrapper.plan(
                rows.to(q.device), begin.to(q.device), listed.int().to(q.device),
                (known - (count - 1) * size).int().to(q.device), workload.heads, workload.kv_heads, workload.head_dim,
                size, head_dim_vo=workload.value_dim, **_options(workload),
            )  # fmt: skip
            out, lse = wrapper.run(q.flatten(0, 1), (k, v), return_lse=True)
            out = out.unflatten(0, (len(q), queries))
            lse = (lse * math.log(2)).unflatten(0, (len(q), queries)).transpose(1, 2).float()
            unseeing = lengths[:, None] < torch.arange(queries, 0, -1, device=q.device)
            return out.masked_fill(unseeing[..., None, None], 0.0), lse.masked_fill(unseeing[:, None], -math.inf)

        return call


def _options(workload: Workload) -> dict[str, Any]:
    """Return the keywords of a plan that every wrapper has."""
    import torch

    left, right = bounds(workload)
    dtype = getattr(torch, workload.dtype)
    return {
        "causal": right == 0, "window_left": -1 if left is None else left, "logits_soft_cap": workload.softcap,
        "sm_scale": workload.softmax_scale, "q_data_type": dtype, "kv_data_type": dtype,
    }  # fmt: skip


def _planner(workload: Workload) -> Callable[[Any], Any]:
    """Return a function from a device to a wrapper, which is planned at the first arrays on the device and kept."""
    wrapper_class = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper

    @cache
    def planned(device: Any) -> Any:
        import torch

        rows = torch.arange(workload.batch + 1, dtype=torch.int32, device=device)
        wrapper = wrapper_class(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")
        wrapper.plan(
            rows * workload.q_len,
            rows * workload.kv_len,
            workload.heads,
            workload.kv_heads,
            workload.head_dim,
            head_dim_vo=workload.value_dim,
            **_options(workload),
        )
        return wrapper

    return planned


FLASHINFER = Flashinfer()
