"""Dilated attention met with a block mask, over a sequence sharded over ranks: dropped blocks are not computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.masks import Blocks, MaskShape
from attnbench.masks.block_patterns import BLOCK_SIZE, PATTERNS, block_pattern, check_sparsity
from attnbench.nn.ring import Layout, RingDilatedAttention, RingMultiheadDilatedAttention
from attnbench.nn.sparse_options import checked_seed


class BlockSparseRingDilatedAttention(RingDilatedAttention):
    """A pair counts as often as branches let it meet, and only if its block is kept; one softmax over what is left.

    Either `block_mask`, booleans [q blocks, k blocks] or [heads, q blocks, k blocks] over global positions, or
    `sparsity`, the share of blocks to drop, by `pattern` (local, the default, strided, global_local, or random with its
    `seed`). Blocks are of 128 unless `block_size` says otherwise. A row that keeps no key gives 0.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        block_mask: Any = None,
        sparsity: float | None = None,
        pattern: str | None = None,
        block_size: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        layout: Layout = "zigzag",
        causal: bool = False,
        offset: Literal["mod", "group"] = "mod",
        scale: float | None = None,
        mix_grad: Literal["full", "detached"] = "full",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            segment_lengths,
            dilation_rates,
            process_group=process_group,
            layout=layout,
            causal=causal,
            offset=offset,
            scale=scale,
            mix_grad=mix_grad,
            dropout=dropout,
        )
        if (block_mask is None) == (sparsity is None):
            raise UsageError("give either block_mask or sparsity (with pattern), and not both.")
        if sparsity is None:
            _refuse_with_a_mask(pattern=pattern, seed=seed)
            self._given = _blocks(block_mask, block_size)
            self.block_size = self._given.block_size
        else:
            check_sparsity(sparsity)
            self._given, self.block_size = None, BLOCK_SIZE if block_size is None else block_size
            pattern = "local" if pattern is None else pattern
            if pattern not in PATTERNS:
                raise UsageError(f'a ring takes the fixed patterns {", ".join(PATTERNS)}, not "{pattern}".')
            block_pattern(pattern, sparsity, MaskShape(1, 1, 1, 1), block_size=self.block_size)  # refuses what is none
        self.sparsity, self.block_pattern = sparsity, pattern
        self.seed = 0 if pattern is None else checked_seed(seed, pattern)

    def blocks(self, tokens: int, heads: int) -> Blocks:
        """The blocks kept of so many tokens."""
        if self._given is not None:
            return self._given
        assert self.sparsity is not None
        assert self.block_pattern is not None
        return _patterned(self.block_pattern, self.sparsity, tokens, heads, self.block_size, self.causal, self.seed)

    def achieved_sparsity(self, tokens: int, heads: int) -> float:
        """Share of blocks really dropped, out of those that the causal mask (if any) lets be seen."""
        kept = self.blocks(tokens, heads).block_mask.array
        candidates = np.ones(kept.shape[-2:], bool)
        candidates = np.tril(candidates) if self.causal else candidates
        return 1.0 - float((kept & candidates).sum() / (candidates.sum() * (kept.size // candidates.size)))

    def _told_of_blocks(self) -> str:
        if self._given is not None:
            return f"block_mask={self._given.id}"
        seed = f", seed={self.seed}" if self.block_pattern == "random" else ""
        return f"sparsity={self.sparsity:g}, pattern={self.block_pattern}, block_size={self.block_size}{seed}"

    def extra_repr(self) -> str:
        """That of the ring, and which blocks are kept."""
        return f"{super().extra_repr()}, {self._told_of_blocks()}"


class BlockSparseRingMultiheadDilatedAttention(RingMultiheadDilatedAttention):
    """The same with projections: x of [b, tokens of this rank, embed_dim] in, the same rows out."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        block_mask: Any = None,
        sparsity: float | None = None,
        pattern: str | None = None,
        block_size: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        layout: Layout = "zigzag",
        num_kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = True,
        offset: Literal["mod", "group"] = "mod",
        scale: float | None = None,
        mix_grad: Literal["full", "detached"] = "full",
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            process_group=process_group,
            layout=layout,
            num_kv_heads=num_kv_heads,
            causal=causal,
            bias=bias,
            offset=offset,
            scale=scale,
            mix_grad=mix_grad,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )
        given = {"block_mask": block_mask, "sparsity": sparsity}
        given |= {"pattern": pattern, "block_size": block_size, "seed": seed}
        named = {name: value for name, value in given.items() if value is not None}
        self.attention = self._over_ranks(BlockSparseRingDilatedAttention, process_group, layout, **named)


def _refuse_with_a_mask(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name}= belongs to sparsity=; a block_mask says itself which blocks are kept.")


def _blocks(block_mask: Any, block_size: int | None) -> Blocks:
    if not isinstance(block_mask, Blocks):
        found = masks.blocks(block_mask, BLOCK_SIZE if block_size is None else block_size)
    elif block_size in (None, block_mask.block_size):
        found = block_mask
    else:
        raise UsageError(f"this block_mask has blocks of {block_mask.block_size}: leave out block_size={block_size}.")
    if found.per_batch:
        raise UsageError(
            "block_mask is [q blocks, k blocks] or [heads, q blocks, k blocks]: the same for all batch rows."
        )
    return found


@lru_cache(maxsize=64)
def _patterned(
    pattern: str, sparsity: float, tokens: int, heads: int, block_size: int, causal: bool, seed: int
) -> Blocks:
    shape = MaskShape(1, heads, tokens, tokens)
    kept = block_pattern(pattern, sparsity, shape, block_size=block_size, causal=causal, seed=seed)
    return masks.blocks(kept[0] if len(kept) == 1 else kept, block_size)
