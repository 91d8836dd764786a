"""FA3's full build, newest interface: LSE on request, backward with `is_causal`. No configuration module."""

import torch
from plain_attention import attend, attend_to_cache, gradients, side


def flash_attn_func(
    q, k, v, softmax_scale=1.0, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=1, return_attn_probs=False
):
    out, lse = attend(q, k, v, softmax_scale, side(window_size[0]), 0 if causal else side(window_size[1]), softcap)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    assert cache_seqlens.dtype == torch.int32
    left, right = side(window_size[0]), 0 if causal else side(window_size[1])
    out, lse = attend_to_cache(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, left, right, softcap)
    return (out, lse, torch.empty(0), torch.empty(0)) if return_softmax_lse else out


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    right = 0 if is_causal else side(window_size_right)
    found = gradients(q, k, v, out, softmax_lse, dout, softmax_scale, side(window_size_left), right, softcap)
    for target, values in zip((dq, dk, dv), found, strict=True):
        target.copy_(values)
    return torch.empty(0)
