"""FlashInfer: takes inputs for float16 unless told; LSE to base 2, [tokens, heads]; window on the left only."""

import math

import torch
from plain_attention import attend

PLANS = []


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        window_left=-1, logits_soft_cap=None, sm_scale=1.0, q_data_type=torch.float16, kv_data_type=None,
    ):  # fmt: skip
        PLANS.append(self)
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.rows = [qo_indptr.tolist(), kv_indptr.tolist()]
        self.heads, self.dtype = (num_qo_heads, num_kv_heads), q_data_type
        self.bounds = (None if window_left < 0 else window_left, 0 if causal else None)
        self.scale, self.softcap = sm_scale, logits_soft_cap

    def run(self, q, k, v, return_lse=False):
        if q.dtype != self.dtype:
            raise ValueError(
                f"The dtype of q {q.dtype} does not match the q_data_type {self.dtype} specified in plan function."
            )
        assert (q.shape[1], k.shape[1]) == self.heads
        parts = []
        starts, stops = self.rows[0][:-1], self.rows[0][1:]
        for a, b, c, d in zip(starts, stops, self.rows[1][:-1], self.rows[1][1:], strict=True):
            parts.append(attend(q[None, a:b], k[None, c:d], v[None, c:d], self.scale, *self.bounds, self.softcap))
        out = torch.cat([part[0][0] for part in parts])
        lse = torch.cat([part[1][0].T for part in parts]) / math.log(2)
        return (out, lse) if return_lse else out
