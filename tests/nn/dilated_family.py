"""All eight dilated modules as functions of (q, k, v), so that one test holds for each of them.

Rings run on one rank, block-sparse ones keep every block. Modules with projections are handed q, k and v side by side
in x, and their weights only pick them out: head h of x holds q, k and v of that head, one after another.
"""

from __future__ import annotations

from functools import partial

import torch

from attnbench import nn

ALL_KEPT = {"sparsity": 0.0, "block_size": 7}
WITH_LSE = {
    "DilatedAttention": nn.DilatedAttention,
    "ImprovedDilatedAttention": nn.ImprovedDilatedAttention,
    "RingDilatedAttention": nn.RingDilatedAttention,
    "BlockSparseRingDilatedAttention": partial(nn.BlockSparseRingDilatedAttention, **ALL_KEPT),
}
"""Kind -> module of (segment_lengths, dilation_rates, **options) on q, k, v."""


def picking(kind, segments, rates, **options):
    """A multihead module as a function of q, k and v; its sizes are those of the arrays of a call."""

    def call(q, k, v, **given):
        (batch, tokens, heads, dim), kv_heads = q.shape, k.shape[2]
        module = kind(
            3 * heads * dim, heads, segments, rates, num_kv_heads=kv_heads, bias=False,
            scale=options.get("scale", dim**-0.5), dtype=q.dtype,
            **{name: value for name, value in options.items() if name != "scale"},
        )  # fmt: skip
        q_rows, k_rows, v_rows = module.in_proj.weight.detach().zero_().split(module.widths)
        for part, (rows, count) in enumerate(((q_rows, heads), (k_rows, kv_heads), (v_rows, kv_heads))):
            picked = rows.view(count, 3 * dim, heads, 3 * dim)
            for head in range(count):
                picked[head, :dim, head, part * dim : (part + 1) * dim] = torch.eye(dim, dtype=q.dtype)
        module.out_proj.weight.detach().copy_(torch.eye(3 * heads * dim, dtype=q.dtype))
        missing = q.new_zeros(batch, tokens, heads - kv_heads, dim)
        x = torch.cat([q, *(torch.cat([part, missing], 2) for part in (k, v))], -1)
        return module(x.flatten(-2), **given).unflatten(-1, (heads, 3 * dim))[..., :dim]

    return call


WITH_PROJECTIONS = {
    "MultiheadDilatedAttention": partial(picking, nn.MultiheadDilatedAttention),
    "ImprovedMultiheadDilatedAttention": partial(picking, nn.ImprovedMultiheadDilatedAttention),
    "RingMultiheadDilatedAttention": partial(picking, nn.RingMultiheadDilatedAttention),
    "BlockSparseRingMultiheadDilatedAttention": partial(
        picking, partial(nn.BlockSparseRingMultiheadDilatedAttention, **ALL_KEPT)
    ),
}
EIGHT = WITH_LSE | WITH_PROJECTIONS
