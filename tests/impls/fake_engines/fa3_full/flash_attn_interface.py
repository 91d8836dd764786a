"""FA3's full build, newest interface: LSE on request, backward with `is_causal`. No configuration module."""

import torch
from plain_attention import attend, gradients, side


def flash_attn_func(
    q, k, v, softmax_scale=1.0, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=1, return_attn_probs=False
):
    out, lse = attend(q, k, v, softmax_scale, side(window_size[0]), 0 if causal else side(window_size[1]), softcap)
    return (out, lse) if return_attn_probs else out


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    right = 0 if is_causal else side(window_size_right)
    found = gradients(q, k, v, out, softmax_lse, dout, softmax_scale, side(window_size_left), right, softcap)
    for target, values in zip((dq, dk, dv), found, strict=True):
        target.copy_(values)
    return torch.empty(0)
