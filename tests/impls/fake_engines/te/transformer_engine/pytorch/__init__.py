"""Transformer Engine: sbhd and causal by default, heads flattened in the output, one-sided windows refused."""

import os

from plain_attention import attend


class DotProductAttention:
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, attention_type="self", softmax_scale=1.0,
    ):  # fmt: skip
        assert attn_mask_type in ("no_mask", "causal", "causal_bottom_right")
        assert qkv_format == "bshd"
        left, right = window_size
        causal = attn_mask_type != "no_mask"
        assert right == 0 and left >= -1 if causal else (left, right) == (-1, -1) or min(left, right) >= 0
        self.bounds = [None if side < 0 else side for side in window_size]
        self.top_left, self.scale = attn_mask_type == "causal", softmax_scale
        self.cross = attention_type == "cross"

    def __call__(self, q, k, v):
        if os.environ.get("NVTE_UNFUSED_ATTN", "1") == "1":
            raise AssertionError("would have fallen back to UnfusedDotProductAttention")
        assert self.cross == (q.shape[1] != k.shape[1])
        return attend(q, k, v, self.scale, *self.bounds, top_left=self.top_left)[0].flatten(2)
