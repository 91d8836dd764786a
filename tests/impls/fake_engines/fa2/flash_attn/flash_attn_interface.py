"""flash-attn 2: +inf LSE for rows that see no key; the private backward fills given arrays. Scale 1 if not passed."""

import torch
from plain_attention import attend, attend_to_cache, gradients, side


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=1.0, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    right = 0 if causal else side(window_size[1])
    out, lse = attend(q, k, v, softmax_scale, side(window_size[0]), right, softcap)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=1.0, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Over a cache; pages have a multiple of 256 tokens."""
    assert num_splits == 0
    assert cache_seqlens.dtype == torch.int32
    assert block_table is None or (block_table.dtype == torch.int32 and k_cache.shape[1] % 256 == 0)
    left, right = side(window_size[0]), 0 if causal else side(window_size[1])
    out, lse = attend_to_cache(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, left, right, softcap)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return (out, lse) if return_softmax_lse else out


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert not (softmax_lse == float("-inf")).any(), "rows that see no key are +inf in flash-attn 2"
    right = 0 if causal else side(window_size_right)
    found = gradients(q, k, v, out, softmax_lse, dout, softmax_scale, side(window_size_left), right, softcap)
    for target, values in zip((dq, dk, dv), found, strict=True):
        target.copy_(values)
    return torch.empty(0)
