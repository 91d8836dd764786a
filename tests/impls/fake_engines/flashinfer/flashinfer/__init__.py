"""FlashInfer: takes inputs for float16 unless told; LSE to base 2, [tokens, heads]; window on the left only."""

import math

import torch
from plain_attention import attend, attend_to_cache

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


class BatchPrefillWithPagedKVCacheWrapper:
    """Planned on the host; a sequence without pages has `last_page_len` of a whole page, or its length is negative."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert kv_layout == "NHD"
        assert not float_workspace_buffer.any()

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=1.0,
        q_data_type=torch.float16, kv_data_type=None,
    ):  # fmt: skip
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype == torch.int32
        count = paged_kv_indptr.diff()
        self.lengths = (count - 1) * page_size + paged_kv_last_page_len
        assert (self.lengths >= 0).all()
        assert (paged_kv_last_page_len <= page_size).all()
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.table = torch.zeros(len(count), max(int(count.max()), 1), dtype=torch.int32)
        self.table[torch.arange(self.table.shape[1]) < count[:, None]] = paged_kv_indices
        self.queries, self.heads, self.dtype = qo_indptr.diff().tolist(), (num_qo_heads, num_kv_heads), q_data_type
        assert len(set(self.queries)) == 1
        self.bounds = (None if window_left < 0 else window_left, 0 if causal else None)
        self.scale, self.softcap = sm_scale, logits_soft_cap

    def run(self, q, paged_kv_cache, return_lse=False):
        assert q.dtype == self.dtype
        k, v = paged_kv_cache
        assert (q.shape[1], k.shape[2]) == self.heads
        q = q.unflatten(0, (-1, self.queries[0]))
        out, lse = attend_to_cache(q, k, v, self.lengths, self.table, self.scale, *self.bounds, self.softcap)
        lse = lse.transpose(1, 2).flatten(0, 1) / math.log(2)
        lse = lse.masked_fill(lse == float("-inf"), -5e4)  # rows that see no key have a finite LSE in some versions
        return (out.flatten(0, 1), lse) if return_lse else out.flatten(0, 1)
