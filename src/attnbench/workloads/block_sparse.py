"""The `block-sparse` suite: fixed patterns at four sparsities, and structured inputs for selection by content."""

from __future__ import annotations

from typing import Any

from attnbench.spec import Workload
from attnbench.workloads.block_patterns import SPARSITIES, sparse_mask
from attnbench.workloads.grid import grid
from attnbench.workloads.masks import MaskShape

K = 1024
PASSES = ["forward", "train"]
PER_HEAD_TOKENS = 4 * K
"""Above this all heads share one random pattern: a record carries its mask."""


def block_sparse() -> list[Workload]:
    """Random blocks over lengths; every pattern, causal, at 90 %; small ones for a CPU; structured inputs."""
    large = {"batch": 1, "heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    small = {"batch": 1, "heads": 4, "head_dim": 64, "dtype": "float32"}
    return [
        *(case for q_len in (4 * K, 16 * K, 32 * K) for s in SPARSITIES for case in _cases("random", s, q_len, large)),
        *(
            case
            for pattern in ("local", "strided", "global_local", "random")
            for case in _cases(pattern, 0.9, 8 * K, large, causal=True)
        ),
        *(case for s in SPARSITIES for case in _cases("random", s, 2 * K, small, block_size=64)),
        *(case for s in SPARSITIES for case in _cases("local", s, 2 * K, small, block_size=64, causal=True)),
        *grid(**small, q_len=2 * K, mask=["full", "causal"], inputs="structured", tags=["structured"]),
        *grid(**large, q_len=16 * K, mask=["full", "causal"], inputs="structured", tags=["structured"]),
    ]


def _cases(pattern: str, sparsity: float, q_len: int, fields: dict[str, Any], **options: Any) -> list[Workload]:
    heads = fields["heads"] if q_len <= PER_HEAD_TOKENS else 1
    mask = sparse_mask(pattern, sparsity, MaskShape(1, heads, q_len, q_len), **options)
    tags = [pattern, f"{sparsity:.0%} sparse"]
    return grid(**fields, q_len=q_len, mask=mask, pass_=PASSES, tags=tags)
