"""Dilated attention by the name of its kind; a new kind is one entry of KINDS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from attnbench.errors import UnknownName
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

KINDS: Mapping[str, tuple[type[nn.Module], type[nn.Module]]] = {
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
) -> nn.Module:
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
) -> nn.Module:
    """Return a module on x of [b, s, embed_dim], of the same kinds; an option unknown to the kind is an error."""
    return _classes(kind)[1](embed_dim, num_heads, segment_lengths, dilation_rates, **options)


def _classes(kind: str) -> tuple[type[nn.Module], type[nn.Module]]:
    name = ALIASES.get(kind, kind)
    if name not in KINDS:
        raise UnknownName("kind of dilated attention", str(kind), [*KINDS, *ALIASES], "")
    return KINDS[name]
