"""Torch modules built on the package's attention: the dilated family, block-sparse attention and its gates.

A new kind of dilated attention is one entry of KINDS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Module

from attnbench.errors import UnknownName
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

KINDS: Mapping[str, tuple[type[Module], type[Module]]] = {
    "standard": (DilatedAttention, MultiheadDilatedAttention),
    "improved": (ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention),
    "ring": (RingDilatedAttention, RingMultiheadDilatedAttention),
    "block_sparse_ring": (BlockSparseRingDilatedAttention, BlockSparseRingMultiheadDilatedAttention),
}
"""Kind -> the class on projected heads, and the one with projections."""
ALIASES: Mapping[str, str] = {"auto": "improved", "distributed": "ring"}
"""Other names of kinds."""


def create_dilated_attention(
    kind: str = "auto", segment_lengths: Sequence[int] = (), dilation_rates: Sequence[int] = (), **options: Any
) -> Module:
    """Return a module on q, k, v of [b, s, h, d].

    `kind`: standard, improved, ring or block_sparse_ring; auto is improved; distributed is ring, over the process group
    that torchrun's ranks initialised (one rank without). All compute the same, but for blocks that are dropped.
    """
    return _classes(kind)[0](segment_lengths, dilation_rates, **options)


def create_multihead_dilated_attention(
    kind: str,
    embed_dim: int,
    num_heads: int,
    segment_lengths: Sequence[int] = (),
    dilation_rates: Sequence[int] = (),
    **options: Any,
) -> Module:
    """Return a module on x of [b, s, embed_dim], of the same kinds; an option unknown to the kind is an error."""
    return _classes(kind)[1](embed_dim, num_heads, segment_lengths, dilation_rates, **options)


def _classes(kind: str) -> tuple[type[Module], type[Module]]:
    name = ALIASES.get(kind, kind)
    if name not in KINDS:
        raise UnknownName("kind of dilated attention", str(kind), [*KINDS, *ALIASES], "")
    return KINDS[name]
