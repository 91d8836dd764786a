"""What each rank does in test_ring.py, as ranks_of_torchrun.py starts it.

Every rank draws the same whole arrays, takes its tokens, and compares its rows with the dense oracle's and with those
of the module on one device.
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from dilated_oracle import attention, visible_counts

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.kernels.ring.function import ring_attention
from attnbench.nn import BlockSparseRingDilatedAttention, ImprovedDilatedAttention, RingDilatedAttention
from attnbench.nn.ring import shard

SEGMENTS, RATES = [8, 16, 48], [1, 2, 3]
TOKENS, LENGTHS = 53, [53, 20, 20, 0, 7]
LAYOUTS = ["contiguous", "zigzag", "striped"]


def draw():
    torch.manual_seed(3)
    return [torch.randn(len(LENGTHS), TOKENS, h, 8, dtype=torch.float64) for h in (6, 2, 2, 6)]


def passes(call, q, k, v, dout):
    """(out, lse, gradients of all but the LSE)."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = call(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def distance(found, wanted, layout):
    """Largest difference of this rank's rows; the LSE is float32."""
    apart = []
    for n, (got, want) in enumerate(zip(found, wanted)):
        mine = shard(want, layout, dim=2 if n == 1 else 1)
        assert not got.isnan().any()
        assert torch.equal(got.isneginf(), mine.isneginf())
        difference = (got - mine).nan_to_num(0.0).abs().max() if got.numel() else torch.zeros(())
        apart.append(float(difference) * (1e-8 if n == 1 else 1.0))
    return max(apart)


def compare(ring, device, count, layout):
    arrays = draw()
    for x in arrays[1:3]:
        for row, length in enumerate(LENGTHS):
            x[row, length:] = float("nan")  # padding may hold anything
    clean = [x.nan_to_num(0.0) for x in arrays]
    found = passes(ring, *(shard(x, layout) for x in arrays))
    errors = [distance(found, passes(lambda q, k, v: attention(q, k, v, count), *clean), layout)]
    if device is not None:
        errors.append(distance(found, passes(device, *arrays), layout))
    return max(errors)


def dilated(layout, causal):
    ring = RingDilatedAttention(SEGMENTS, RATES, layout=layout, causal=causal)
    one = ImprovedDilatedAttention(SEGMENTS, RATES, causal=causal)
    given = {"kv_lengths": LENGTHS, "return_lse": True}
    count = visible_counts(draw()[0], SEGMENTS, RATES, causal=causal, lengths=LENGTHS)
    return compare(lambda *x: ring(*x, **given), lambda *x: one(*x, **given), count, layout)


def detached(layout):
    """Gradients are those of the module on one device; the oracle has none like them."""
    arrays, given = draw(), {"kv_lengths": torch.tensor(LENGTHS), "return_lse": True}
    ring = RingDilatedAttention(SEGMENTS, RATES, layout=layout, mix_grad="detached")
    one = ImprovedDilatedAttention(SEGMENTS, RATES, mix_grad="detached")
    found = passes(lambda *x: ring(*x, **given), *(shard(x, layout) for x in arrays))
    return distance(found, passes(lambda *x: one(*x, **given), *arrays), layout)


def block_sparse(layout, causal):
    torch.manual_seed(1)
    kept = torch.rand(7, 7) < 0.5
    ring = BlockSparseRingDilatedAttention(SEGMENTS, RATES, causal=causal, block_mask=kept, block_size=8, layout=layout)
    every = kept.repeat_interleave(8, -2).repeat_interleave(8, -1)[:TOKENS, :TOKENS]
    count = visible_counts(draw()[0], SEGMENTS, RATES, causal=causal, lengths=LENGTHS) * every
    return compare(lambda *x: ring(*x, kv_lengths=LENGTHS, return_lse=True), None, count, layout)


def dense(layout, causal):
    given = {"kv_lengths": LENGTHS, "return_lse": True, "causal": causal, "layout": layout}
    count = visible_counts(draw()[0], [TOKENS], [1], causal=causal, lengths=LENGTHS)
    return compare(lambda *x: ring_attention(*x, **given), None, count, layout)


def unlike_lengths():
    """Rank 0 gives lengths and the others none: all refuse."""
    q, k, v, _ = (shard(x) for x in draw())
    return answer(lambda: RingDilatedAttention(SEGMENTS, RATES)(q, k, v, kv_lengths=of_rank(LENGTHS, None)))


def of_rank(first, others):
    return others if dist.get_rank() else first


def disagreements():
    """What each way to disagree with rank 0 is answered with."""
    q, k, v, _ = (shard(x) for x in draw())
    single, fewer = ([x.to(torch.float32) for x in (q, k, v)], [x[:3] for x in (q, k, v)])
    learns = q.detach().requires_grad_()
    ring = {
        "causal": lambda: RingDilatedAttention(SEGMENTS, RATES, causal=of_rank(True, False))(q, k, v),
        "scale": lambda: RingDilatedAttention(SEGMENTS, RATES, scale=of_rank(0.5, None))(q, k, v),
        "layout": lambda: RingDilatedAttention(SEGMENTS, RATES, layout=of_rank("striped", "zigzag"))(q, k, v),
        "pattern": lambda: RingDilatedAttention(of_rank([8, 16], [8, 32]), [1, 2])(q, k, v),
        "dtype": lambda: RingDilatedAttention(SEGMENTS, RATES)(*of_rank(single, (q, k, v))),
        "batch": lambda: RingDilatedAttention(SEGMENTS, RATES)(*of_rank(fewer, (q, k, v))),
        "requires_grad": lambda: RingDilatedAttention(SEGMENTS, RATES)(of_rank(learns, q), k, v),
    }
    dense = {
        "causal": lambda: ring_attention(q, k, v, causal=of_rank(True, False)),
        "scale, softcap": lambda: ring_attention(q, k, v, scale=of_rank(0.5, None), softcap=of_rank(9.0, None)),
        "layout": lambda: ring_attention(q, k, v, layout=of_rank("striped", "zigzag")),
        "dtype": lambda: ring_attention(*of_rank(single, (q, k, v))),
        "batch": lambda: ring_attention(*of_rank(fewer, (q, k, v))),
        "requires_grad": lambda: ring_attention(q, of_rank(k.detach().requires_grad_(), k), v),
        "heads": lambda: ring_attention(q, *of_rank((k, v), (k[:, :, :1], v[:, :, :1]))),
        "pattern": lambda: ring_attention(q, k, v, dilated=of_rank(masks.dilated([8], [1]), None)),
    }
    return [[name, answer(call)] for calls in (ring, dense) for name, call in calls.items()]


def answer(call):
    try:
        call()
    except UsageError as error:
        return str(error)
    return "accepted"


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {"unlike": unlike_lengths(), "disagreements": disagreements()}
    for layout in LAYOUTS:
        found[layout] = {
            "dilated": [dilated(layout, causal) for causal in (False, True)],
            "detached": [detached(layout)],
            "block sparse": [block_sparse(layout, causal) for causal in (False, True)],
            "dense": [dense(layout, causal) for causal in (False, True)],
        }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
