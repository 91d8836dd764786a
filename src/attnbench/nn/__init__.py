"""Torch modules built on the package's attention: the dilated family, block-sparse attention and its gates."""

from attnbench.nn.block_sparse import (
    AdaptiveSparseAttention,
    BlockGate,
    BlockSparseAttention,
    create_adaptive_sparse_attention,
    create_block_sparse_attention,
    train_gate,
)
from attnbench.nn.dilated import (
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
)
from attnbench.nn.factory import create_dilated_attention, create_multihead_dilated_attention
from attnbench.nn.ring import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
)

__all__ = [
    "AdaptiveSparseAttention", "BlockGate", "BlockSparseAttention", "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention", "DilatedAttention", "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention", "MultiheadDilatedAttention", "RingDilatedAttention",
    "RingMultiheadDilatedAttention", "create_adaptive_sparse_attention", "create_block_sparse_attention",
    "create_dilated_attention", "create_multihead_dilated_attention", "train_gate",
]  # fmt: skip
