"""Dilated attention from its definition, in float64: one dense softmax whose logits carry log(count)."""

from __future__ import annotations

import math

import torch


def counts(tokens, heads, segments, rates, offset="mod"):
    """[h, i, j]: branches in which i and j meet, by listing each segment's tokens."""
    found = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for width, rate in zip(segments, rates):
        met = {}
        for head in range(heads):
            first = head % rate if offset == "mod" else head // math.ceil(heads / rate)
            if first not in met:
                met[first] = _meetings(tokens, width, rate, first)
            found[head] += met[first]
    return found


def _meetings(tokens, width, rate, first):
    """[i, j]: 1 where both are among the tokens that one segment keeps."""
    found = torch.zeros(tokens, tokens, dtype=torch.float64)
    for start in range(0, tokens, width):
        kept = slice(start + first, min(start + width, tokens), rate)
        found[kept, kept] = 1
    return found


def visible_counts(q, segments, rates, offset="mod", causal=False, lengths=None):
    """[b, h, i, j], with future keys and padding taken out."""
    batch, tokens, heads, _ = q.shape
    found = counts(tokens, heads, segments, rates, offset).expand(batch, -1, -1, -1).clone()
    if causal:
        found = found.tril()
    for row, length in enumerate(lengths or ()):
        found[row, :, :, length:] = 0
    return found


def attention(q, k, v, count, scale=None):
    """(out [b, s, h, d], lse [b, h, s]), differentiable."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = (logits + count.log()).masked_fill(count == 0, float("-inf"))
    seen = (count > 0).any(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(~seen, 0.0), -1) * seen
    return torch.einsum("bhij,bjhd->bihd", weights, v), torch.logsumexp(logits, -1)


def detached(q, k, v, segments, rates, causal):
    """torchscale's gradient: branches attend apart and mix by weights that count as constants."""
    parts = [attention(q, k, v, visible_counts(q, [w], [r], causal=causal)) for w, r in zip(segments, rates)]
    total = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0).detach()
    total = total.masked_fill(total == float("-inf"), 0.0)
    return sum((lse.detach() - total).exp().transpose(1, 2).unsqueeze(-1) * out for out, lse in parts)
