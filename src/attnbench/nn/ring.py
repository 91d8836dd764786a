"""Dilated attention over a sequence that is sharded over the ranks of a process group, also with a block mask.

Every rank passes its own tokens, as `layout` distributes them, and gets its own rows. Keys and values travel round the
ring; per-rank memory falls as ranks are added. Without a process group there is one rank, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.kernels.ring.function import (
    attend_over_ranks,
    rank_and_world,
    refused_by_all,
    ring_attention,  # noqa: F401 (users import it from here)
)
from attnbench.kernels.ring.schedule import Layout, check_layout, positions
from attnbench.masks import Blocks, MaskShape
from attnbench.masks.block_patterns import BLOCK_SIZE, PATTERNS, block_pattern, check_sparsity
from attnbench.nn.block_sparse import checked_seed
from attnbench.nn.dilated import DilatedAttention, Lengths, MultiheadDilatedAttention
from attnbench.tracing import outside_graphs


class RingDilatedAttention(DilatedAttention):
    """Dilated attention of q, k, v [b, tokens of this rank, h, d]; the output has the same rows.

    `process_group`: None is torch's default group, or one rank if none was initialised. `layout` says which tokens a
    rank holds: `shard` and `gather` follow it. Every rank must make the same calls in the same order.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        process_group: Any = None,
        layout: Layout = "zigzag",
        causal: bool = False,
        offset: Literal["mod", "group"] = "mod",
        scale: float | None = None,
        mix_grad: Literal["full", "detached"] = "full",
        dropout: float = 0.0,
    ) -> None:
        options = {"causal": causal, "offset": offset, "scale": scale, "mix_grad": mix_grad, "dropout": dropout}
        super().__init__(segment_lengths, dilation_rates, **options)
        check_layout(layout)
        self.process_group, self.layout = process_group, layout

    @outside_graphs
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kv_lengths: Lengths = None, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return [b, tokens of this rank, h, d]; with `return_lse` also the LSE [b, h, tokens of this rank], float32.

        Keys from position kv_lengths[b] of the whole sequence on are padding; every rank gives the same lengths.
        """
        return attend_over_ranks(
            q, k, v, who=type(self).__name__, causal=self.causal, scale=self.scale, softcap=None, layout=self.layout,
            inner=self.how.get("kernel", "auto"), process_group=self.process_group, lengths=None, dilated=self.pattern,
            detached=self.mix_grad == "detached", blocks=self.blocks, kept=self._kept_blocks_text(),
            kv_lengths=kv_lengths, return_lse=return_lse,
        )  # fmt: skip

    def blocks(self, tokens: int, heads: int) -> Blocks | None:
        """Return the block mask over the whole sequence that restricts the pattern: None, all blocks are kept."""
        del tokens, heads

    def _kept_blocks_text(self) -> str:
        """Describe which blocks are kept, by text that is the same on every rank."""
        return ""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layout={self.layout}"


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Dilated attention with projections of x [b, tokens of this rank, embed_dim]; every rank has all parameters."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
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
            embed_dim, num_heads, segment_lengths, dilation_rates, num_kv_heads=num_kv_heads, causal=causal, bias=bias,
            offset=offset, scale=scale, mix_grad=mix_grad, dropout=dropout, device=device, dtype=dtype,
        )  # fmt: skip
        self.attention = self._over_ranks(RingDilatedAttention, process_group, layout)

    def heads_of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return Q, K and V of [b, tokens of this rank, heads, dim]; if one rank refuses x, all ranks raise."""
        with refused_by_all(self.attention.process_group, x):
            return super().heads_of(x)

    def _over_ranks(
        self, ring_class: type[RingDilatedAttention], process_group: Any, layout: Layout, **more: Any
    ) -> RingDilatedAttention:
        """Return a ring attention with the checked options of `self.attention`, over the ranks of a group."""
        of = self.attention
        return ring_class(
            of.pattern.segment_lengths,
            of.pattern.dilation_rates,
            process_group=process_group,
            layout=layout,
            causal=of.causal,
            offset=of.pattern.offset,
            scale=of.scale,
            mix_grad=of.mix_grad,
            **more,
        )


def shard(x: torch.Tensor, layout: Layout = "zigzag", process_group: Any = None, dim: int = 1) -> torch.Tensor:
    """Return this rank's tokens of a whole array that every rank has."""
    rank, world = rank_and_world(process_group)
    places = torch.from_numpy(positions(layout, x.shape[dim], world, rank)).to(x.device)
    return x.index_select(dim, places)


def gather(x: torch.Tensor, layout: Layout = "zigzag", process_group: Any = None, dim: int = 1) -> torch.Tensor:
    """Return the whole array, on every rank, from the tokens that each rank holds; no gradient flows through it."""
    import torch.distributed as dist

    dim = dim % x.dim()
    _, world = rank_and_world(process_group)
    if world == 1:
        return x
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([x.shape[dim]], device=x.device), group=process_group)
    lengths = [int(count) for count in counts]
    # Ranks may hold different numbers of tokens, and all_gather wants equal ones.
    padded = x.new_zeros(*x.shape[:dim], max(lengths), *x.shape[dim + 1 :])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x.detach())
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=process_group)
    whole = x.new_empty(*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :])
    for rank, (part, length) in enumerate(zip(parts, lengths)):
        places = torch.from_numpy(positions(layout, sum(lengths), world, rank)).to(x.device)
        whole.index_copy_(dim, places, part.narrow(dim, 0, length))
    return whole


class BlockSparseRingDilatedAttention(RingDilatedAttention):
    """Dilated attention over ranks in which only pairs of kept blocks count; dropped blocks are not computed.

    A kept pair counts once for each branch in which it meets, and one softmax runs over all of them.

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
        options = {"causal": causal, "offset": offset, "scale": scale, "mix_grad": mix_grad, "dropout": dropout}
        super().__init__(segment_lengths, dilation_rates, process_group=process_group, layout=layout, **options)
        if (block_mask is None) == (sparsity is None):
            raise UsageError("give either block_mask or sparsity (with pattern), not both.")
        if sparsity is None:
            for name, value in (("pattern", pattern), ("seed", seed)):
                if value is not None:
                    raise UsageError(
                        f"{name}= is used only with sparsity=: a block_mask already says which blocks are kept."
                    )
            self._given = _blocks(block_mask, block_size)
            self.block_size = self._given.block_size
        else:
            check_sparsity(sparsity)
            self._given, self.block_size = None, BLOCK_SIZE if block_size is None else block_size
            pattern = "local" if pattern is None else pattern
            if pattern not in PATTERNS:
                raise UsageError(f'a ring takes only the fixed patterns {", ".join(PATTERNS)}, not "{pattern}".')
            # Raises if it is not a pattern.
            block_pattern(pattern, sparsity, MaskShape(1, 1, 1, 1), block_size=self.block_size)
        self.sparsity, self.block_pattern = sparsity, pattern
        self.seed = 0 if pattern is None else checked_seed(seed, pattern)

    def blocks(self, tokens: int, heads: int) -> Blocks:
        if self._given is not None:
            return self._given
        assert self.sparsity is not None
        assert self.block_pattern is not None
        return _patterned(self.block_pattern, self.sparsity, tokens, heads, self.block_size, self.causal, self.seed)

    def achieved_sparsity(self, tokens: int, heads: int) -> float:
        """Return the share of blocks really dropped, out of those that are visible under the causal mask, if any."""
        kept = self.blocks(tokens, heads).block_mask.array
        candidates = np.ones(kept.shape[-2:], bool)
        candidates = np.tril(candidates) if self.causal else candidates
        return 1.0 - float((kept & candidates).sum() / (candidates.sum() * (kept.size // candidates.size)))

    def _kept_blocks_text(self) -> str:
        if self._given is not None:
            return f"block_mask={self._given.id}"
        seed = f", seed={self.seed}" if self.block_pattern == "random" else ""
        return f"sparsity={self.sparsity:g}, pattern={self.block_pattern}, block_size={self.block_size}{seed}"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._kept_blocks_text()}"


class BlockSparseRingMultiheadDilatedAttention(RingMultiheadDilatedAttention):
    """Block-sparse ring attention with projections of x [b, tokens of this rank, embed_dim]; same rows out."""

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
            embed_dim, num_heads, segment_lengths, dilation_rates, process_group=process_group, layout=layout,
            num_kv_heads=num_kv_heads, causal=causal, bias=bias, offset=offset, scale=scale, mix_grad=mix_grad,
            dropout=dropout, device=device, dtype=dtype,
        )  # fmt: skip
        given = {"block_mask": block_mask, "sparsity": sparsity}
        given |= {"pattern": pattern, "block_size": block_size, "seed": seed}
        named = {name: value for name, value in given.items() if value is not None}
        self.attention = self._over_ranks(BlockSparseRingDilatedAttention, process_group, layout, **named)


def _blocks(block_mask: Any, block_size: int | None) -> Blocks:
    if not isinstance(block_mask, Blocks):
        blocks = masks.blocks(block_mask, BLOCK_SIZE if block_size is None else block_size)
    elif block_size in (None, block_mask.block_size):
        blocks = block_mask
    else:
        raise UsageError(f"block_mask has blocks of {block_mask.block_size} tokens: leave out block_size={block_size}.")
    if blocks.per_batch:
        raise UsageError(
            "block_mask must be [q blocks, k blocks] or [heads, q blocks, k blocks], the same for all batch rows."
        )
    return blocks


@lru_cache(maxsize=64)
def _patterned(
    pattern: str, sparsity: float, tokens: int, heads: int, block_size: int, causal: bool, seed: int
) -> Blocks:
    shape = MaskShape(1, heads, tokens, tokens)
    kept = block_pattern(pattern, sparsity, shape, block_size=block_size, causal=causal, seed=seed)
    return masks.blocks(kept[0] if len(kept) == 1 else kept, block_size)
