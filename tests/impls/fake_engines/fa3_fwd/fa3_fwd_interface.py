"""fa3-fwd 0.0.3: a tensor unless asked for the LSE; asks for its build flags under the full build's module name."""

import torch
from plain_attention import attend, attend_to_cache, side


def flash_attn_func(
    q, k, v, softmax_scale=1.0, causal=False, qv=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    from flash_attn_config import CONFIG

    assert CONFIG["build_flags"]["FLASHATTENTION_DISABLE_LOCAL"]
    if window_size != (-1, -1):
        raise RuntimeError("This flash attention build does not support local attention.")
    assert q.dtype == torch.bfloat16, "This flash attention build does not support fp16."
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
    if page_table is not None:
        raise RuntimeError("This flash attention build does not support paged KV.")
    left, right = side(window_size[0]), 0 if causal else side(window_size[1])
    out, lse = attend_to_cache(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, left, right, softcap)
    return (out, lse, torch.empty(0), torch.empty(0)) if return_softmax_lse else out


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, window_size_left=-1, window_size_right=-1):
    raise RuntimeError("This flash attention build does not support backward.")


class Operator:
    """As torch.library registers one: its function lies below, and what it returns may be none of its inputs."""

    def __init__(self, function):
        self._init_fn = function

    def __call__(self, *arrays, out_=None, **options):
        if out_ is not None:
            raise RuntimeError("The output of this custom operator may not alias any of its inputs.")
        return self._init_fn(*arrays, **options)


@Operator
def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, softmax_scale=None, causal=False, window_size_left=-1,
    window_size_right=-1, attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    sides = (window_size_left, window_size_right)
    out, lse = flash_attn_func(q, k, v, softmax_scale, causal, None, sides, 0, softcap, return_attn_probs=True)
    if out_ is not None:
        out = out_.copy_(out)
    return out, lse, torch.empty(0), torch.empty(0)
