"""Which blocks to keep, judged by content: the attention mass of each block, estimated from pooled Q and K alone.

Tokens are averaged in runs of `pool` and the products taken between runs, so an estimate costs 1 / pool^2 of QK^T. Only
blocks that every row of a block row sees are chosen among; those cut by the mask (a causal diagonal) are always kept,
so that a key never decides about rows that do not see it. The queries of a block row decide together: a later query of
the same block has a say in what an earlier one sees.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attnbench.errors import UsageError
from attnbench.kernels.block_sparse.tables import BlockTables, tables_of
from attnbench.masks import Mask, MaskShape, blocks
from attnbench.masks.block_patterns import ROUNDING
from attnbench.masks.cuts import block_layout

POOL = 8
CHUNK_PRODUCTS = 1 << 26
"""Products of pooled tokens held at once."""


class Choice(NamedTuple):
    """What may be chosen among: [b or 1, 1, q blocks, kv blocks] of a mask without blocks."""

    tables: BlockTables
    """All that is seen, as if everything were kept."""
    free: torch.Tensor
    """Blocks that all rows see whole: chosen among."""
    forced: torch.Tensor
    """Blocks cut by the mask: always kept."""

    def keeping(self, chosen: torch.Tensor) -> BlockTables:
        """Tables of the forced blocks and the chosen ones ([b, h, q blocks, kv blocks])."""
        kept = (chosen & self.free) | self.forced
        return self.tables._replace(kept=kept, whole=kept & self.free)

    def sparsity(self, kept: torch.Tensor) -> float:
        """Share of the seen blocks that are dropped."""
        seen = (self.free | self.forced).expand(kept.shape).sum()
        return 1 - float(kept.sum() / seen)


def choice(mask: Mask, shape: MaskShape, block_size: int, device: torch.device) -> Choice:
    """What a mask leaves to choose; it must leave each row one run of keys."""
    counts = [-(-length // block_size) for length in (shape.q_len, shape.kv_len)]
    layout = block_layout(mask & blocks(torch.ones(counts, dtype=torch.bool), block_size), shape)
    if layout is None:
        raise UsageError(f"blocks can be chosen under masks of one run of keys a row, not under {mask.id}.")
    tables = tables_of(layout, shape, device)
    return Choice(tables, tables.whole, tables.kept & ~tables.whole)


def pooled(x: torch.Tensor, pool: int) -> torch.Tensor:
    """[b, h, tokens, d] -> float32 means over runs of `pool` tokens; a shorter last run by what it has."""
    tokens = x.shape[2]
    missing = -tokens % pool
    runs = torch.nn.functional.pad(x.float(), (0, 0, 0, missing)).unflatten(2, (-1, pool)).sum(3)
    sizes = torch.full((runs.shape[2], 1), float(pool), device=x.device)
    sizes[-1] -= missing
    return runs / sizes


def block_mass(
    q: torch.Tensor, k: torch.Tensor, free: torch.Tensor, block_size: int, pool: int, scale: float
) -> torch.Tensor:
    """[b, h, q blocks, kv blocks] estimated share of each free block in its row's attention, from pooled q and k.

    q [b, h, runs, r] and k [b, h or g, runs, r] are pooled (and perhaps projected); rows sum to 1, or
    to 0 where none is free.
    """
    per_block, rest = divmod(block_size, pool)
    if rest:
        raise UsageError(f"pool must divide the block size, and {pool} does not divide {block_size}.")
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    rows, columns = free.shape[2:]
    step = max(1, CHUNK_PRODUCTS // (q.shape[0] * q.shape[1] * k.shape[2] * per_block))
    real = torch.arange(rows * per_block, device=q.device).view(rows, per_block, 1) < q.shape[2]
    q = torch.nn.functional.pad(q, (0, 0, 0, rows * per_block - q.shape[2])).unflatten(2, (rows, per_block))
    k = torch.nn.functional.pad(k, (0, 0, 0, columns * per_block - k.shape[2]))
    parts = []
    for first in range(0, rows, step):
        some, allowed = q[:, :, first : first + step], free[:, :, first : first + step]
        logits = torch.einsum("bhipr,bhjr->bhipj", some, k) * scale
        logits = logits.unflatten(4, (columns, per_block)).logsumexp(-1)
        weights = logits.masked_fill(~allowed[:, :, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        own = real[first : first + step]
        parts.append((weights * own).sum(3) / own.sum(1))
    return torch.cat(parts, 2)


def before(mass: torch.Tensor) -> torch.Tensor:
    """Mass of the heavier blocks of the same row: a block is among the fewest that reach t exactly if this is < t."""
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    return (ordered.cumsum(-1) - ordered).gather(-1, order.argsort(-1))


def by_threshold(mass: torch.Tensor, threshold: float) -> torch.Tensor:
    """In each row the fewest blocks whose mass reaches the threshold."""
    return (before(mass) < threshold) & (mass > 0)


def within_budget(mass: torch.Tensor, choice: Choice, threshold: float, least: float, most: float) -> torch.Tensor:
    """By threshold, but a row never drops less than `least` of its blocks, nor more than `most`; it keeps one.

    Where no number of blocks lies between the two, `least` holds.
    """
    rank = mass.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    forced = choice.forced.sum(-1, keepdim=True)
    seen = forced + choice.free.sum(-1, keepdim=True)
    fewest = ((1 - most) * seen.double() - ROUNDING).ceil().clamp(min=1).long()
    largest = ((1 - least) * seen.double() + ROUNDING).floor().clamp(min=1).long()
    low, high = ((bound - forced).clamp(min=0) for bound in (fewest, largest))
    counts = by_threshold(mass, threshold).sum(-1, keepdim=True)
    return rank < torch.minimum(torch.maximum(counts, low), high)


def calibrated(mass: torch.Tensor, choice: Choice, sparsity: float) -> float:
    """The threshold whose mean sparsity over these rows is nearest to the request."""
    shape = mass.shape
    free, forced = (part.expand(shape) for part in (choice.free, choice.forced))
    wanted = (1 - sparsity) * float((free | forced).sum()) - float(forced.sum())
    if wanted < 0:
        reachable = 1 - float(forced.sum() / (free | forced).sum())
        raise UsageError(
            f"sparsity {sparsity:g} cannot be reached: the blocks cut by the mask are always kept, "
            f"which leaves at most {math.floor(reachable * 100) / 100:g} here (smaller blocks or more tokens help)."
        )
    values = before(mass)[free & (mass > 0)].sort().values
    if not len(values):
        return 1.0
    edge = values[min(round(wanted), len(values) - 1)]
    below, up_to = ((values < edge).sum(), (values <= edge).sum())
    nearer_above = abs(float(up_to) - wanted) < abs(float(below) - wanted)
    return float(torch.nextafter(edge, edge + 1)) if nearer_above else float(edge)
