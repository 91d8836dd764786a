"""Dilated attention over a sequence that is sharded over the ranks of a process group.

Every rank passes its own tokens, as `layout` deals them out, and gets its own rows. Keys and values travel round the
ring; per-rank memory falls as ranks are added. Without a process group there is one rank, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from attnbench.frameworks.torch_autocast import under_autocast
from attnbench.impls._arguments import check_tensors
from attnbench.kernels.ring.agreement import RefusedByAll, agreement, global_lengths, rank_and_world
from attnbench.kernels.ring.function import check_kernel, key_lengths, ring_attention, shape_of
from attnbench.kernels.ring.schedule import check_layout, positions
from attnbench.masks import Blocks
from attnbench.nn.dilated import DilatedAttention, Lengths
from attnbench.nn.multihead import MultiheadDilatedAttention
from attnbench.tracing import outside_graphs

Layout = Literal["contiguous", "zigzag", "striped"]


class RingDilatedAttention(DilatedAttention):
    """q, k, v of [b, tokens of this rank, h, d] in, the same rows out.

    `process_group`: None is torch's default group, or one rank where none was initialised. `layout` says which tokens a
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
        """[b, tokens of this rank, h, d]; with `return_lse` also the LSE [b, h, tokens of this rank], float32.

        Keys from position kv_lengths[b] of the whole sequence on are padding; every rank gives the same lengths.
        """
        inner = self.how.get("kernel", "auto")
        with RefusedByAll(self.process_group, q, k, v):
            check_tensors(type(self).__name__, q, k, v)
            q, k, v = under_autocast(q, k, v)
            limits = key_lengths(kv_lengths)
            check_kernel(q, k, shape_of(q, k, v, self.scale, None), inner, self.causal)
        said = {"pattern": (self.pattern.id, self.mix_grad, self._told_of_blocks()), "kv_lengths": limits}
        said |= {"layout": self.layout, "inner": inner, "return_lse": return_lse}
        lengths = global_lengths(
            q, k, self.process_group, agreement(q, k, v, causal=self.causal, scale=self.scale, **said)
        )
        return ring_attention(
            q,
            k,
            v,
            causal=self.causal,
            scale=self.scale,
            layout=self.layout,
            inner=inner,
            process_group=self.process_group,
            lengths=lengths,
            dilated=self.pattern,
            detached=self.mix_grad == "detached",
            blocks=self.blocks(lengths[0], q.shape[2]),
            kv_lengths=limits,
            return_lse=return_lse,
        )

    def blocks(self, tokens: int, heads: int) -> Blocks | None:
        """A block mask over the whole sequence that the pattern is met with: none."""
        del tokens, heads

    def _told_of_blocks(self) -> str:
        """Which blocks are kept, in words that are the same on every rank."""
        return ""

    def extra_repr(self) -> str:
        """The pattern, the layout, and what differs from the defaults."""
        return f"{super().extra_repr()}, layout={self.layout}"


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """x of [b, tokens of this rank, embed_dim] in, the same rows out; parameters are the same on every rank."""

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
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
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
        self.attention = self._over_ranks(RingDilatedAttention, process_group, layout)

    def heads_of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """As without ranks; what one rank refuses, all refuse."""
        with RefusedByAll(self.attention.process_group, x):
            return super().heads_of(x)

    def _over_ranks(
        self, ring_class: type[RingDilatedAttention], process_group: Any, layout: Layout, **more: Any
    ) -> RingDilatedAttention:
        """The attention that was checked, over the ranks of a group."""
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
    """This rank's tokens of a whole array that every rank has."""
    rank, world = rank_and_world(process_group)
    places = torch.from_numpy(positions(layout, x.shape[dim], world, rank)).to(x.device)
    return x.index_select(dim, places)


def gather(x: torch.Tensor, layout: Layout = "zigzag", process_group: Any = None, dim: int = 1) -> torch.Tensor:
    """The whole array, on every rank, of what each of them holds; no gradient flows through it."""
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
