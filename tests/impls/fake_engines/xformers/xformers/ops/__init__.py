"""xFormers: no broadcasting of heads, LSE padded beyond q_len, and an import that takes any `flash_attn` for FA2."""

import importlib.util

import torch
from plain_attention import attend, gradients

from xformers.ops.fmha import attn_bias as biases

if importlib.util.find_spec("flash_attn"):
    import flash_attn.flash_attn_interface  # noqa: F401


def memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=1.0):
    if query.shape[2:-1] != key.shape[2:-1]:
        raise ValueError("HINT: We don't support broadcasting, please use `expand` yourself")
    if query.ndim == 5 and query.requires_grad:
        raise NotImplementedError("No operator found for `memory_efficient_attention_backward`")
    flat = [array.flatten(2, -2) for array in (query, key, value)]
    left = right = None
    if isinstance(attn_bias, biases.LocalAttentionFromBottomRightMask):
        left, right = attn_bias.window_left, attn_bias.window_right
    elif attn_bias is not None:
        right = 0
    out, lse = attend(*flat, scale, left, right, top_left=isinstance(attn_bias, biases.LowerTriangularMask))
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    return out.unflatten(2, query.shape[2:-1]), padded.unflatten(1, query.shape[2:-1])


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=1.0):
    return memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias, p, scale)[0]


def memory_efficient_attention_backward(grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=1.0):
    if query.shape[2:] != key.shape[2:]:
        raise ValueError("HINT: We don't support broadcasting, please use `expand` yourself")
    if lse.shape[1] != query.shape[2] or lse.shape[2] < query.shape[1]:
        raise ValueError("Input tensors have incompatible shapes.")
    left = right = None
    if isinstance(attn_bias, biases.LocalAttentionFromBottomRightMask):
        left, right = attn_bias.window_left, attn_bias.window_right
    elif attn_bias is not None:
        assert not isinstance(attn_bias, biases.LowerTriangularMask) or query.shape[1] == key.shape[1]
        right = 0
    return gradients(query, key, value, output, lse[..., : query.shape[1]], grad, scale, left, right)
