"""Transformer Engine's DotProductAttention: cuDNN's fused attention or flash-attention, whichever it picks.

A module, not a function, whose defaults are another problem's: layout sbhd, a causal mask, and an output with the heads
flattened into the last axis. If no fused kernel fits, it would silently fall back to plain matrix products, so that
fall-back is switched off for the process, and the kernels that ran are checked.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from attnbench.impls import conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.torch._masks import bounds, is_causal, is_top_left, is_windowed, needs_bounds, needs_visible_rows
from attnbench.spec import Call, Config, Environment, Implementation, Workload


class TransformerEngine(Implementation):
    """NVIDIA Transformer Engine's DotProductAttention: cuDNN or flash-attention, whichever the library picks."""

    name = "torch.transformer-engine"
    framework = "torch"
    not_deterministic = ("backward",)
    process = "transformer-engine"
    forbids = (r"scaled_\w*softmax_warp", r"UnfusedDotProductAttention")
    untested = ("cuda",)

    def available(self, environment: Environment) -> str | None:
        return first_reason(
            conditions.needs_device(environment, "cuda"),
            conditions.needs_package(
                "transformer_engine.pytorch", "pip install --no-build-isolation 'transformer_engine[pytorch]'"
            ),
            conditions.needs_capability(environment, (8, 0)),
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        rectangular = is_windowed(workload) and workload.q_len != workload.kv_len
        return first_reason(
            conditions.needs_dtype(workload, "float16", "bfloat16"),
            needs_bounds(workload),
            "aligns windows differently by kernel: a window needs q_len = kv_len" if rectangular else None,
            needs_visible_rows(workload),
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            conditions.needs_head_dim(workload, 256, multiple_of=8),
            conditions.needs_cudnn_training_dims(workload, environment),
        )

    def build(self, workload: Workload, config: Config) -> Call:
        # Read at every call. A user's own setting is kept; `forbids` then finds the plain products that it allows.
        os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
        mask_type, window = _mask(workload)
        module: Any = import_module("transformer_engine.pytorch").DotProductAttention(
            num_attention_heads=workload.heads,
            kv_channels=(workload.head_dim, workload.value_dim),
            num_gqa_groups=workload.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type=mask_type,
            window_size=window,
            attention_type="self" if workload.q_len == workload.kv_len else "cross",
            softmax_scale=workload.softmax_scale,
        )
        return lambda q, k, v: module(q, k, v).unflatten(-1, (workload.heads, workload.value_dim))


def _mask(workload: Workload) -> tuple[str, tuple[int, int]]:
    """Return the library's name of the mask and its window: (-1, -1) is none, and a single side cannot be left open."""
    left, right = bounds(workload)
    if is_causal(workload):
        same_corner = is_top_left(workload) or workload.q_len == workload.kv_len
        return "causal" if same_corner else "causal_bottom_right", (-1, 0)
    if not is_windowed(workload):
        return "no_mask", (-1, -1)
    far = workload.q_len + workload.kv_len
    window = far if left is None else left, far if right is None else right
    return "causal" if right == 0 else "no_mask", window


TRANSFORMER_ENGINE = TransformerEngine()
