"""What each rank does in test_ring.py, as ranks_of_torchrun.py starts it.

Every rank draws the same whole arrays, takes its tokens, and compares its rows with the dense oracle's.
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from dilated_oracle import attention, detached, visible_counts

from attnbench.errors import AttnBenchError, UsageError
from attnbench.kernels.ring.function import ring_attention
from attnbench.kernels.ring.schedule import positions
from attnbench.nn import (
    BlockSparseRingDilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
)
from attnbench.nn.ring import gather, shard

SEGMENTS, RATES = [8, 16, 48], [1, 2, 3]
TOKENS = 53


def draw(heads, kv_heads, tokens=TOKENS):
    torch.manual_seed(3)
    return [torch.randn(2, tokens, h, 8, dtype=torch.float64) for h in (heads, kv_heads, kv_heads, heads)]


def apart(got, want):
    return float((got - want).norm() / want.norm())


def compare(module, arrays, count, layout):
    """Largest relative distance of this rank's rows of out and gradients, and of its LSE."""
    q, k, v, dout = arrays
    leaves = [shard(x, layout).clone().requires_grad_() for x in (q, k, v)]
    out, lse = module(*leaves, return_lse=True)
    got = [out, *torch.autograd.grad(out, leaves, shard(dout, layout))]
    exact = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    want_out, want_lse = attention(*exact, count)
    want = [want_out, *torch.autograd.grad(want_out, exact, dout)]
    errors = [apart(one.detach(), shard(other, layout).detach()) for one, other in zip(got, want)]
    unlike = (lse - shard(want_lse, layout, dim=2)).nan_to_num(0.0, 0.0, 0.0).abs().max()
    return max(*errors, float(unlike) * 1e-8)


def ring(layout, causal, heads, kv_heads, offset):
    module = RingDilatedAttention(SEGMENTS, RATES, causal=causal, offset=offset, layout=layout)
    arrays = draw(heads, kv_heads)
    return compare(module, arrays, visible_counts(arrays[0], SEGMENTS, RATES, offset, causal), layout)


def block_sparse(layout, causal, per_head):
    arrays = draw(4, 2)
    torch.manual_seed(1)
    kept = torch.rand(4, 7, 7) < 0.5 if per_head else torch.rand(7, 7) < 0.5
    module = BlockSparseRingDilatedAttention(
        SEGMENTS, RATES, causal=causal, block_mask=kept, block_size=8, layout=layout
    )
    count = visible_counts(arrays[0], SEGMENTS, RATES, "mod", causal)
    every = kept.repeat_interleave(8, -2).repeat_interleave(8, -1)[..., :TOKENS, :TOKENS]
    return compare(module, arrays, count * every, layout)


def lse_gradients(layout, by_all, out_too, mix_grad="full"):
    """Of a loss in which all ranks' LSEs have a part, or rank 0's alone; it is float32, and so is its gradient."""
    q, k, v, dout = draw(6, 2)
    module = RingDilatedAttention(SEGMENTS, RATES, causal=True, layout=layout, mix_grad=mix_grad)
    dlse = torch.randn(2, 6, TOKENS, dtype=torch.float64)
    mine = shard(torch.arange(TOKENS), layout, dim=0)
    if not by_all:
        of_rank_0 = torch.from_numpy(positions(layout, TOKENS, dist.get_world_size(), 0))
        dlse[..., [n for n in range(TOKENS) if n not in of_rank_0]] = 0
    leaves = [shard(x, layout).clone().requires_grad_() for x in (q, k, v)]
    out, lse = module(*leaves, return_lse=True)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    want_out, want_lse = attention(*exact, visible_counts(q, SEGMENTS, RATES, causal=True))
    if mix_grad == "detached":
        want_out = detached(*exact, SEGMENTS, RATES, True)
    seen = want_lse.isfinite()
    told, want = [], (want_lse[seen] * dlse[seen]).sum()
    if by_all or dist.get_rank() == 0:
        told.append((lse[seen[..., mine]] * dlse[..., mine][seen[..., mine]]).sum())
    if out_too or not told:
        told.append((out * shard(dout, layout)).sum() * out_too)
        want = want + (want_out * dout).sum() * out_too
    sum(told).backward()
    want.backward()
    got = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    errors = [apart(a, shard(b.grad, layout)) for a, b in zip(got, exact) if b.grad is not None]
    return max(errors)


def scaled_lse_gradients(layout):
    """In float16, of a loss so large that the LSE's gradient is none of it, and not on all ranks alike."""
    q, k, v, _ = (x.mul(0.1).half() for x in draw(4, 2))
    mine = shard(torch.arange(TOKENS), layout, dim=0)
    dlse = torch.linspace(0.0, 2.0**18, TOKENS, dtype=torch.float64)
    leaves = [shard(x, layout).clone().requires_grad_() for x in (q, k, v)]
    _, lse = ring_attention(*leaves, causal=True, layout=layout, return_lse=True)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    _, want = attention(*exact, torch.ones(1, 4, TOKENS, TOKENS, dtype=torch.float64).tril())
    (lse * dlse[mine]).sum().backward()
    (want * dlse).sum().backward()
    return max(apart(a.grad.double(), shard(b.grad, layout)) for a, b in zip(leaves[:2], exact))


def torchscale_gradients():
    q, k, v, dout = draw(6, 6)
    module = RingDilatedAttention(SEGMENTS, RATES, causal=True, mix_grad="detached")
    leaves = [shard(x).clone().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(module(*leaves), leaves, shard(dout))
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(detached(*exact, SEGMENTS, RATES, True), exact, dout)
    return max(apart(one, shard(other)) for one, other in zip(got, want))


def multihead():
    """Rows, and the gradients of shared parameters summed over ranks, are those of one device."""
    torch.manual_seed(7)
    one = MultiheadDilatedAttention(32, 4, SEGMENTS, RATES, num_kv_heads=2, causal=True, dtype=torch.float64)
    many = RingMultiheadDilatedAttention(32, 4, SEGMENTS, RATES, num_kv_heads=2, causal=True, dtype=torch.float64)
    many.load_state_dict(one.state_dict())
    x = torch.randn(2, TOKENS, 32, dtype=torch.float64)
    whole, rows = one(x), many(shard(x))
    whole.square().sum().backward()
    rows.square().sum().backward()
    errors = [apart(rows.detach(), shard(whole.detach())), apart(gather(rows.detach()), whole.detach())]
    last = shard(whole.detach().transpose(1, 2).contiguous(), dim=-1)
    errors.append(apart(gather(last, dim=-1), whole.detach().transpose(1, 2)))
    for a, b in zip(one.parameters(), many.parameters()):
        dist.all_reduce(b.grad)
        errors.append(apart(b.grad, a.grad))
    return max(errors)


def dense():
    q, k, v, _ = draw(4, 2)
    out = ring_attention(*(shard(x, "striped") for x in (q, k, v)), causal=True, layout="striped", inner="torch.eager")
    want, _ = attention(q, k, v, torch.ones(1, 4, TOKENS, TOKENS).tril())
    return apart(out, shard(want, "striped"))


def wrong_shard():
    """One rank comes with a token too many: all refuse, nobody waits."""
    q, k, v, _ = (shard(x) for x in draw(4, 4, 48))
    if dist.get_rank() == 1:
        q, k, v = (torch.cat([x, x[:, :1]], 1) for x in (q, k, v))
    try:
        RingDilatedAttention(SEGMENTS, RATES)(q, k, v)
    except UsageError as error:
        return str(error)
    return "accepted"


def refused():
    """Rank 1 comes with something else, or with what it refuses by itself: what each rank says, and nobody waits."""
    one = dist.get_rank() == 1
    q, k, v, _ = (shard(x) for x in draw(4, 2))
    x = torch.randn(2, q.shape[1], 32, dtype=torch.float64)
    module = RingDilatedAttention(SEGMENTS, RATES)
    multihead = RingMultiheadDilatedAttention(32, 4, SEGMENTS, RATES, dtype=torch.float64)
    calls = {
        "return_lse": lambda: ring_attention(q, k, v, return_lse=one),
        "inner": lambda: ring_attention(q, k, v, inner="torch.eager" if one else "auto"),
        "unsupported": lambda: ring_attention(q, k, v, inner="torch.flash-attn" if one else "auto"),
        "unknown": lambda: ring_attention(q, k, v, inner="torch.nothing" if one else "auto"),
        "layout": lambda: ring_attention(q, k, v, layout="round" if one else "zigzag"),
        "shape": lambda: ring_attention(q, k, v[:, 1:] if one else v),
        "dtype": lambda: ring_attention(q, k, v.float() if one else v),
        "kind": lambda: ring_attention(q, k, None if one else v),
        "key lengths": lambda: ring_attention(q, k, v, kv_lengths=[-1, 5] if one else [5, 5]),
        "module's return_lse": lambda: module(q, k, v, return_lse=one),
        "module's shape": lambda: module(q, k, v[:, 1:] if one else v),
        "multihead's shape": lambda: multihead(x[..., :8] if one else x),
        "multihead's dtype": lambda: multihead(x.float() if one else x),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "accepted"
        except AttnBenchError as error:
            found[name] = str(error)
    return found


def in_a_subgroup():
    """Ranks 0 and 2 alone; the others are not asked."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return 0.0
    q, k, v, _ = draw(4, 4)
    module = RingDilatedAttention(SEGMENTS, RATES, causal=True, process_group=group)
    got = module(*(shard(x, process_group=group) for x in (q, k, v)))
    want, _ = attention(q, k, v, visible_counts(q, SEGMENTS, RATES, causal=True))
    return apart(got, shard(want, process_group=group))


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {
        "ring": [
            ring("zigzag", True, 6, 2, "mod"), ring("striped", True, 4, 4, "group"),
            ring("contiguous", False, 6, 3, "mod"),
        ],
        "block sparse": [block_sparse("zigzag", True, True), block_sparse("striped", False, False)],
        "lse": [
            lse_gradients("zigzag", True, True), lse_gradients("striped", True, False),
            lse_gradients("contiguous", False, True), lse_gradients("zigzag", False, False),
            lse_gradients("zigzag", True, True, "detached"),
        ],
        "scaled": [scaled_lse_gradients("contiguous"), scaled_lse_gradients("zigzag")],
        "detached": torchscale_gradients(),
        "multihead": multihead(),
        "dense": dense(),
        "subgroup": in_a_subgroup(),
        "wrong": wrong_shard(),
        "refused": refused(),
    }  # fmt: skip
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
