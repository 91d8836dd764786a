"""flash-attn-4: no bound is None, always a tuple, and a private forward that returns 2 values (b12) or 5 (b36)."""

from plain_attention import attend, gradients

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
