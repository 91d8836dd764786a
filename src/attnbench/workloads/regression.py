"""The `regression` suite: small enough for a CPU, wide enough that every implementation that runs on one has a case."""

from __future__ import annotations

from attnbench.spec import Workload
from attnbench.workloads.block_patterns import sparse_mask
from attnbench.workloads.edge import pi0_edges
from attnbench.workloads.grid import grid
from attnbench.workloads.mask_text import parse_mask
from attnbench.workloads.masks import MaskShape, block_causal

PASSES = ["forward", "train"]
DILATION = "dilated:64r1+128r2+256r4"
BLOCK = 32
SPARSITY = 0.75


def regression() -> list[Workload]:
    """Dense, causal, grouped, windowed, prefixed, decoding, dilated, block-sparse problems, and steps built on them."""
    shape = {"batch": 1, "q_len": 256, "heads": 4, "head_dim": 64}
    step = shape | {"head_dim": 32}
    place = MaskShape(1, 4, 256, 256)
    blocks = sparse_mask("random", SPARSITY, place, block_size=BLOCK)
    return [
        *grid(**shape, pass_=PASSES),
        *grid(**shape, mask="causal"),
        *grid(**shape | {"heads": "4:2"}, mask="causal", pass_="train", tags=["grouped"]),
        *grid(**shape, mask="window:64:0"),
        *grid(**shape, mask=block_causal([0] * 200 + [1] * 56), pass_="train", tags=["prefix"]),
        *grid(batch=2, q_len=1, kv_len=1024, heads="4:2", head_dim=64, tags=["decode"]),
        *grid(**shape, mask=f"causal&{DILATION}", pass_=PASSES, tags=["dilated"]),
        *grid(**shape, mask=blocks, pass_=PASSES, tags=["block-sparse"]),
        *grid(**shape, mask="causal", inputs="structured", tags=["structured"]),
        *grid(**step, mask=f"causal&{DILATION}", pass_="train", step="multihead", tags=["dilated"]),
        *grid(**step, mask=parse_mask(DILATION, place) & blocks, step="multihead", tags=["dilated", "block-sparse"]),
        *grid(**step | {"q_len": 64, "heads": "4:1"}, mask="causal", pass_="train", step="gemma-stack", tags=["gemma"]),
        *pi0_edges(),
    ]
