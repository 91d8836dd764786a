"""fa3-fwd 0.0.3: a tensor unless asked for the LSE; asks for its build flags under the full build's module name."""

import torch
from plain_attention import attend, side


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


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, window_size_left=-1, window_size_right=-1):
    raise RuntimeError("This flash attention build does not support backward.")
