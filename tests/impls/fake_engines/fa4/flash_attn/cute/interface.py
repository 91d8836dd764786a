"""flash-attn-4: no bound is None, always a tuple, and a private forward that returns 2 values (b12) or 5 (b36)."""

import torch
from plain_attention import attend, attend_to_cache, gradients

FORWARD_VALUES = 2


def _bounds(causal, left, right):
    right = 0 if causal else right
    # What the real one does: -1 on a side cancels the window altogether.
    return (None, None) if left is not None and right is not None and left + right < 0 else (left, right)


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    softmax_scale=1.0,
    causal=False,
    window_size=(None, None),
    softcap=0.0,
    num_splits=1,
    return_lse=False,
):
    out, lse = attend(q, k, v, softmax_scale, *_bounds(causal, *window_size), softcap)
    return out, lse if return_lse or q.requires_grad else None


def _flash_attn_fwd(
    q,
    k,
    v,
    softmax_scale=1.0,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    return_lse=False,
    out=None,
):
    found, lse = attend(q, k, v, softmax_scale, *_bounds(causal, window_size_left, window_size_right), softcap)
    out = found if out is None else out.copy_(found)
    return (out, lse if return_lse else None, None, None, None)[:FORWARD_VALUES]


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=1.0, causal=False, softcap=0.0, window_size_left=None, window_size_right=None
):
    sides = _bounds(causal, window_size_left, window_size_right)
    return gradients(q, k, v, out, lse, dout, softmax_scale, *sides, softcap)


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, aux_tensors=None, return_lse=False,
):  # fmt: skip
    """Over a cache: q is [b, n, h, d], `seqused_k` int32; on Hopper it does not split the keys."""
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    assert seqused_k.dtype == torch.int32
    assert page_table is None or page_table.dtype == torch.int32
    left, right = window_size[0], 0 if causal else window_size[1]
    out, lse = attend_to_cache(q, k, v, seqused_k, page_table, softmax_scale, left, right, softcap)
    return out, lse if return_lse else None
