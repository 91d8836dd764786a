"""Selection of blocks by content: the attention mass of each block, estimated from pooled Q and K. Imports torch.

Tokens are averaged in runs of `pool` and the products taken between runs, so an estimate costs 1 / pool^2 of QK^T. Only
blocks that every row of a block row sees can be dropped; blocks that the mask cuts (a causal diagonal) are always
kept, so that a key never influences rows that do not see it. The queries of a block row decide together: a later
query of the same block influences which blocks an earlier query sees.

`BlockGate` is a small gate that learns where attention goes: linear maps of pooled Q and K, trained against true
attention. The maps start as the identity, which is the plain estimate of `block_mass`. Training undoes what pooling
does to single keys: directions that matter are amplified, noise is damped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from attnbench.errors import UsageError
from attnbench.impls._arguments import check_scale, check_whole
from attnbench.kernels.block_sparse.tables import BlockTables, tables_of
from attnbench.masks import Mask, MaskShape, blocks
from attnbench.masks.block_patterns import ROUNDING
from attnbench.masks.cuts import block_layout
from attnbench.spec import Workload
from attnbench.workloads.inputs import draw

POOL = 8
"""Tokens whose mean is one pooled token."""
CHUNK_PRODUCTS, CHUNK_LOGITS = 1 << 26, 1 << 26
"""Most products of pooled tokens, and most logits, held at once."""
LEARNING_RATE, STEPS = 4e-3, 200
CALIBRATION, TRAINING = (10_000, 10_001), range(20_000, 20_016)
"""Seeds of draws that no check and no measurement uses."""
Select = Callable[[torch.Tensor, torch.Tensor], tuple[BlockTables, float]]
"""Function of (q, k) in layout bhsd that returns the blocks to keep and their achieved sparsity."""


class BlockChoice(NamedTuple):
    """Blocks [b or 1, 1, q blocks, kv blocks] of a mask, those to choose among and those that are always kept."""

    tables: BlockTables
    """Tables of all visible blocks, as if everything were kept."""
    free: torch.Tensor
    """Blocks that all rows see whole: they are chosen among."""
    forced: torch.Tensor
    """Blocks cut by the mask: always kept."""

    def keeping(self, chosen: torch.Tensor) -> BlockTables:
        """Return tables of the forced blocks and of the chosen blocks [b, h, q blocks, kv blocks]."""
        kept = (chosen & self.free) | self.forced
        return self.tables._replace(kept=kept, whole=kept & self.free)

    def sparsity(self, kept: torch.Tensor) -> float:
        """Return the share of the visible blocks that are dropped."""
        seen = (self.free | self.forced).expand(kept.shape).sum()
        return 1 - float(kept.sum() / seen)


def choice(mask: Mask, shape: MaskShape, block_size: int, device: torch.device) -> BlockChoice:
    """Return the blocks that a mask leaves to choose; raise UsageError unless each row sees one run of keys."""
    counts = [-(-length // block_size) for length in (shape.q_len, shape.kv_len)]
    layout = block_layout(mask & blocks(torch.ones(counts, dtype=torch.bool), block_size), shape)
    if layout is None:
        raise UsageError(
            "blocks can only be chosen under a mask in which every row sees one contiguous range of keys; "
            f"{mask.id} is not such a mask."
        )
    tables = tables_of(layout, shape, device)
    return BlockChoice(tables, tables.whole, tables.kept & ~tables.whole)


def pooled(x: torch.Tensor, pool: int) -> torch.Tensor:
    """Average [b, h, tokens, d] over runs of `pool` tokens, in float32; a shorter last run over its own tokens."""
    tokens = x.shape[2]
    missing = -tokens % pool
    runs = torch.nn.functional.pad(x.float(), (0, 0, 0, missing)).unflatten(2, (-1, pool)).sum(3)
    sizes = torch.full((runs.shape[2], 1), float(pool), dtype=torch.float32, device=x.device)
    sizes[-1] -= missing
    return runs / sizes


def block_mass(
    q: torch.Tensor, k: torch.Tensor, free: torch.Tensor, block_size: int, pool: int, scale: float
) -> torch.Tensor:
    """Estimate the share [b, h, q blocks, kv blocks] of each free block in its row's attention, from pooled q and k.

    q [b, h, runs, r] and k [b, h or g, runs, r] are pooled (and perhaps projected); rows sum to 1, or to 0 if no block
    is free.
    """
    per_block, rest = divmod(block_size, pool)
    if rest:
        raise UsageError(f"pool must divide the block size; {pool} does not divide {block_size}.")
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
    """Sum the mass of the heavier blocks of the same row: a block is among the fewest that reach t if this is < t."""
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    return (ordered.cumsum(-1) - ordered).gather(-1, order.argsort(-1))


def by_threshold(mass: torch.Tensor, threshold: float) -> torch.Tensor:
    """Choose in each row the fewest blocks whose mass reaches the threshold."""
    return (before(mass) < threshold) & (mass > 0)


def within_budget(mass: torch.Tensor, choice: BlockChoice, threshold: float, least: float, most: float) -> torch.Tensor:
    """Choose by threshold, but drop at least `least` and at most `most` of a row's blocks, and keep one at least.

    If no number of blocks lies between the two, `least` holds.
    """
    rank = mass.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    forced = choice.forced.sum(-1, keepdim=True)
    seen = forced + choice.free.sum(-1, keepdim=True)
    fewest = ((1 - most) * seen.double() - ROUNDING).ceil().clamp(min=1).long()
    largest = ((1 - least) * seen.double() + ROUNDING).floor().clamp(min=1).long()
    low, high = ((bound - forced).clamp(min=0) for bound in (fewest, largest))
    counts = by_threshold(mass, threshold).sum(-1, keepdim=True)
    return rank < torch.minimum(torch.maximum(counts, low), high)


def calibrated(mass: torch.Tensor, choice: BlockChoice, sparsity: float) -> float:
    """Return the threshold whose mean sparsity over these rows is nearest to the requested sparsity."""
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


class BlockGate(torch.nn.Module):
    """Estimator of block mass for q [b, h, t, d] and k [b, g, s, d], with 2 * heads * head_dim^2 parameters."""

    def __init__(self, heads: int, head_dim: int, *, pool: int = POOL, scale: float | None = None) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("head_dim", head_dim), ("pool", pool)):
            check_whole(name, value, 1)
        check_scale(scale)
        self.pool, self.scale = pool, head_dim**-0.5 if scale is None else scale
        self.query, self.key = (torch.nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1)) for _ in range(2))

    def forward(self, q: torch.Tensor, k: torch.Tensor, choice: BlockChoice) -> torch.Tensor:
        """Estimate the mass of each block [b, h, q blocks, kv blocks], as `block_mass` does."""
        heads, dim = self.query.shape[:2]
        if q.shape[1] != heads or q.shape[3] != dim:
            raise UsageError(f"this gate is for {heads} heads of {dim}, but q has {q.shape[1]} heads of {q.shape[3]}.")
        k = pooled(k, self.pool).repeat_interleave(heads // k.shape[1], 1)
        own, keys = (
            torch.einsum("bhtd,hde->bhte", x, weight)
            for x, weight in ((pooled(q, self.pool), self.query), (k, self.key))
        )
        return block_mass(own, keys, choice.free, choice.tables.block_size, self.pool, self.scale)

    def extra_repr(self) -> str:
        heads, dim = self.query.shape[:2]
        return f"heads={heads}, head_dim={dim}, pool={self.pool}, scale={self.scale:g}"


def true_mass(q: torch.Tensor, k: torch.Tensor, choice: BlockChoice, scale: float) -> torch.Tensor:
    """Compute a block row's mean attention to each block [b, h, q blocks, kv blocks], from all of QK^T."""
    size, (low, high) = choice.tables.block_size, (choice.tables.low, choice.tables.high)
    rows, columns = choice.free.shape[2:]
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    keys = torch.arange(k.shape[2], device=k.device)
    step = max(1, CHUNK_LOGITS // (q.shape[0] * q.shape[1] * k.shape[2] * size)) * size
    parts = []
    for first in range(0, q.shape[2], step):
        logits = q[:, :, first : first + step].float() @ k.transpose(-1, -2) * scale
        bounds = (edge[:, None, first : first + step, None] for edge in (low, high))
        begin, end = bounds
        weights = logits.masked_fill((keys < begin) | (keys >= end), -torch.inf).softmax(-1).nan_to_num(0.0)
        padded = torch.nn.functional.pad(weights, (0, columns * size - k.shape[2], 0, -weights.shape[2] % size))
        by_block = padded.unflatten(3, (columns, size)).sum(-1).unflatten(2, (-1, size)).sum(3)
        parts.append(by_block)
    real = (q.shape[2] - torch.arange(rows, device=q.device) * size).clamp(max=size)
    return torch.cat(parts, 2) / real[:, None]


def train_gate(
    gate: BlockGate,
    examples: Sequence[tuple[torch.Tensor, torch.Tensor]],
    mask: Mask,
    block_size: int,
    *,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
) -> list[float]:
    """Fit the gate to true attention on examples (q, k) in layout bhsd; return each step's loss (cross entropy)."""
    targets = []
    for q, k in examples:
        chosen = choice(mask, MaskShape(q.shape[0], q.shape[1], q.shape[2], k.shape[2]), block_size, q.device)
        mass = true_mass(q, k, chosen, gate.scale) * chosen.free
        targets.append((chosen, mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)))
    optimiser = torch.optim.Adam(gate.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        (q, k), (chosen, target) = examples[step % len(examples)], targets[step % len(examples)]
        loss = -(target * gate(q, k, chosen).clamp(min=1e-9).log()).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def estimate(
    q: torch.Tensor, k: torch.Tensor, chosen: BlockChoice, scale: float, pool: int = POOL, gate: BlockGate | None = None
) -> torch.Tensor:
    """Estimate the mass of each free block, by the gate if there is one; no gradient flows through a choice."""
    with torch.no_grad():
        if gate is not None:
            return gate(q, k, chosen)
        return block_mass(pooled(q, pool), pooled(k, pool), chosen.free, chosen.tables.block_size, pool, scale)


@lru_cache(maxsize=8)
def selector(workload: Workload, device: torch.device, sparsity: float, block_size: int, learned: bool) -> Select:
    """Make the selection of a workload, calibrated (and trained) on draws of its inputs; cached for all calls."""
    w, scale = workload, workload.softmax_scale
    chosen = choice(w.visible_mask, w.mask_shape, block_size, device)
    gate = None
    if learned:
        gate = BlockGate(w.heads, w.head_dim, scale=scale).to(device)
        with torch.enable_grad():
            train_gate(gate, list(_examples(w, TRAINING, device)), w.visible_mask, block_size)
    typical = [estimate(q, k, chosen, scale, gate=gate) for q, k in _examples(w, CALIBRATION, device)]
    threshold = calibrated(torch.cat(typical), chosen, sparsity)

    def select(q: torch.Tensor, k: torch.Tensor) -> tuple[BlockTables, float]:
        tables = chosen.keeping(by_threshold(estimate(q, k, chosen, scale, gate=gate), threshold))
        return tables, chosen.sparsity(tables.kept)

    return select


def _examples(
    workload: Workload, seeds: Iterable[int], device: torch.device
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    for seed in seeds:
        q, k, *_ = draw(workload, seed)
        yield tuple(torch.from_numpy(x).to(device).transpose(1, 2).contiguous() for x in (q, k))  # pyright: ignore
