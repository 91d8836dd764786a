"""Your own kernel against the field: is it right, and where does it stand?

    python examples/own_kernel.py --quick

`blockwise` computes causal attention over blocks of keys with a running softmax. `forgetful` is the same without the
correction of what was summed before: it is called wrong, and has no time.
"""

import argparse

import torch

import attnbench as ab
from attnbench.analyse.summary import format_ratio, rank

BLOCK = 128


def blockwise(q, k, v, corrects=True):
    """Layout [batch, tokens, heads, head_dim]; any function of (q, k, v) will do."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    top, total, out = q.new_full((*q.shape[:3], 1), -1e30), q.new_zeros(*q.shape[:3], 1), torch.zeros_like(q)
    for start in range(0, k.shape[2], BLOCK):
        keys, values = k[:, :, start : start + BLOCK], v[:, :, start : start + BLOCK]
        hidden = torch.arange(start, start + keys.shape[2]) > torch.arange(q.shape[2])[:, None]
        logits = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        weights, shrink = (logits - new_top).exp(), (top - new_top).exp() if corrects else 1.0
        total, out, top = total * shrink + weights.sum(-1, keepdim=True), out * shrink + weights @ values, new_top
    return (out / total).transpose(1, 2)


def forgetful(q, k, v):
    """The bug that every author of such a kernel has had once."""
    return blockwise(q, k, v, corrects=False)


def main(quick: bool) -> None:
    """Measure both beside three others, interleaved, and say where they stand."""
    shape = {"batch": 1, "q_len": 256 if quick else 1024, "heads": 8, "head_dim": 64, "causal": True}
    field = [blockwise, forgetful, "torch.eager", "torch.sdpa", "torch.sdpa-math"]
    records = ab.compare_implementations(field, shape, device="cpu", trials=10 if quick else None)
    rows = {row.implementation: row for row in rank(records, base="torch.sdpa")}
    for name, row in rows.items():
        told = f"{time.median_ns / 1e6:.3f} ms" if (time := row.record.time) else row.reason
        print(f"{'=' if row.tied else row.rank or '-':>2}  {name:16} {told}")

    mine, ranks = rows["blockwise"], [row.rank for row in rows.values() if row.rank is not None]
    if mine.rank is None or mine.speedup is None:
        raise SystemExit(f"blockwise has no place: {mine.reason}.")
    place, peers = f"number {mine.rank} of {len(ranks)}", ranks.count(mine.rank) - 1
    alone = f", {place}, {format_ratio(mine.speedup)} as fast as torch.sdpa"
    shared = f" and shares {place} with {peers} more: too few samples to tell them apart"
    print(f"blockwise is right{shared if peers else alone}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape and few samples")
    main(parser.parse_args().quick)
