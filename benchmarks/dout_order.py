"""Are torch's own gradients right if dO changes its order in memory? `python benchmarks/dout_order.py`, on a GPU.

For each backend of scaled_dot_product_attention and each shape, the gradients are taken with Q, K, V and then dO heads
first, tokens first, or strided along the last axis, one after the other in one process, and held against those of the
first order. torch 2.11 finds cuDNN's plans by the strides of Q, K and V alone.
"""

from __future__ import annotations

from itertools import product

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
SHAPES = ((64, 8, 8, 512), (72, 8, 8, 512), (128, 8, 2, 512), (192, 8, 8, 512), (256, 8, 4, 512), (256, 16, 8, 4096))
"""head_dim, heads, key/value heads, tokens."""
ORDERS = {"heads first": (0, 1, 2, 3), "tokens first": (0, 2, 1, 3), "last axis strided": (0, 1, 3, 2)}


def laid_out(array: torch.Tensor, order: str) -> torch.Tensor:
    """Return a copy in an order of memory; each order is its own inverse."""
    return array.permute(ORDERS[order]).contiguous().permute(ORDERS[order])


def main() -> None:
    for backend, (dim, heads, kv_heads, tokens), causal in product(BACKENDS, SHAPES, (False, True)):
        if backend is SDPBackend.EFFICIENT_ATTENTION and heads != kv_heads:
            continue
        sizes = [(1, one, tokens, dim) for one in (heads, kv_heads, kv_heads, heads)]
        *inputs, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
        first, worst = None, {}
        for of_q, of_dout in product(list(ORDERS)[:2], ORDERS):
            given = [laid_out(array, of_q).requires_grad_() for array in inputs]
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *given, is_causal=causal, enable_gqa=heads != kv_heads
                )
                found = torch.autograd.grad(out, given, laid_out(dout, of_dout))
            first = first or found
            off = [float((x - y).float().norm() / y.float().norm()) for x, y in zip(found, first)]
            worst[f"Q {of_q}, dO {of_dout}"] = max(off)
        shape = f"{tokens} tokens, {heads}:{kv_heads} heads of {dim}, {'causal' if causal else 'full'}"
        told = "; ".join(f"{case}: {share:.0e}" for case, share in worst.items())
        print(f"{backend.name} {shape}: {told}", flush=True)


if __name__ == "__main__":
    main()
