"""Attention in plain torch, bshd, aligned bottom-right; what every stand-in computes with."""

import torch


def attend(q, k, v, scale, left=None, right=None, softcap=None, top_left=False):
    """(out in q's dtype, natural-log LSE [b, h, q] with -inf for rows that see no key)."""
    group = q.shape[2] // k.shape[2]
    keys, values = (array.repeat_interleave(group, 2).double() for array in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    offset = 0 if top_left else k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1])[None] - torch.arange(q.shape[1])[:, None] - offset
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    logits = logits.masked_fill(hidden, -1e30)
    weights = torch.softmax(logits, -1).masked_fill(hidden, 0.0)
    lse = torch.logsumexp(logits, -1).masked_fill(hidden.all(-1), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", weights, values).to(q.dtype), lse.float()


def gradients(q, k, v, out, lse, dout, scale, left=None, right=None, softcap=None):
    """What flash kernels compute from a given out and lse, which may be those of a larger whole."""
    assert not softcap
    group = q.shape[2] // k.shape[2]
    keys, values = (array.repeat_interleave(group, 2).double() for array in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * scale
    distance = torch.arange(k.shape[1])[None] - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    weights = torch.exp(logits - lse.double()[..., None]).masked_fill(hidden, 0.0)
    dweights = torch.einsum("bihd,bjhd->bhij", dout.double(), values)
    delta = torch.einsum("bihd,bihd->bhi", dout.double(), out.double())
    dlogits = weights * (dweights - delta[..., None]) * scale
    fold = (*k.shape[:2], k.shape[2], group, -1)
    dq = torch.einsum("bhij,bjhd->bihd", dlogits, keys)
    dk = torch.einsum("bhij,bihd->bjhd", dlogits, q.double()).reshape(fold).sum(3)
    dv = torch.einsum("bhij,bihd->bjhd", weights, dout.double()).reshape(fold).sum(3)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def side(bound):
    """flash-attention 2 and 3 spell "no bound" -1."""
    return None if bound < 0 else bound


def attend_to_cache(q, k, v, lengths, table, scale, left=None, right=None, softcap=None):
    """Attention over a cache, sequence by sequence: only what lengths and the table say is there is read."""
    parts = []
    for b, length in enumerate(lengths.tolist()):
        keys, values = (x[b] if table is None else x[table[b, : -(-length // x.shape[1])].long()] for x in (k, v))
        keys, values = (x.flatten(0, 1) if table is not None else x for x in (keys, values))
        if length == 0:
            blank = torch.zeros(1, q.shape[1], q.shape[2], v.shape[3], dtype=q.dtype)
            parts.append((blank, torch.full((1, q.shape[2], q.shape[1]), float("-inf"))))
            continue
        parts.append(attend(q[b : b + 1], keys[None, :length], values[None, :length], scale, left, right, softcap))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
