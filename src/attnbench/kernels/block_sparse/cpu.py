"""Block-sparse attention on a CPU: only kept blocks are gathered and computed.

Rows of blocks that keep equally many are one batch for torch's fused operator: the queries of a row against its
gathered keys. Work and traffic are proportional to the kept blocks, forward and backward. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.kernels.block_sparse.tables import BlockTables
from attnbench.spec import Partial

CHUNK_ELEMENTS = 1 << 22
"""Most elements of gathered keys, or of bias, held at once."""


class Chunk(NamedTuple):
    """Rows with equally many kept blocks."""

    queries: Tensor
    """Flat (batch, head, query block) of each row [r]."""
    keys: Tensor
    """Flat (batch, key/value head, key block) of each row's blocks [r, c]."""
    partial: int
    """Number of last blocks that may need masking in some row."""
    bounds: Tensor | None
    """First and one-past-last key of each query [r, 2, size]; None if no block is partial."""
    starts: Tensor | None
    """First key of each partial block [r, partial]."""
    dead: Tensor | None
    """Mask of the queries that see no key [r, size]; None if every query sees a key."""


class CpuPlan(NamedTuple):
    """Chunks of rows, made once for a mask."""

    size: int
    blocks: tuple[int, int]
    """Numbers of query and key blocks."""
    chunks: list[Chunk]


def plan(tables: BlockTables, kv_heads: int, dim: int) -> CpuPlan:
    """Group rows by their number of kept blocks, and cut the groups into chunks whose gathered keys stay small."""
    batch, heads = tables.shape.batch, tables.shape.heads
    axes = (batch, heads, *tables.kept.shape[2:])
    lists = tables._replace(kept=tables.kept.expand(axes), whole=tables.whole.expand(axes)).by_row
    counts = lists.begin.diff()
    size, key_blocks = tables.block_size, axes[3]
    chunks = []
    for count in counts.unique().tolist():
        if count == 0:
            continue
        rows = (counts == count).nonzero().flatten()
        rows = rows[lists.wholes[rows].argsort(stable=True)]  # rows that need masking become neighbours
        step = max(1, CHUNK_ELEMENTS // (count * size * max(dim, size)))
        for part in rows.split(step):
            columns = lists.columns[lists.begin[part][:, None] + torch.arange(count)].long()
            group = part // (axes[2] * (heads // kv_heads))
            keys = group[:, None] * key_blocks + columns
            chunks.append(_chunk(tables, part, keys, columns, count - int(lists.wholes[part].min())))
    return CpuPlan(size, (axes[2], key_blocks), chunks)


def _chunk(tables: BlockTables, rows: Tensor, keys: Tensor, columns: Tensor, partial: int) -> Chunk:
    if partial == 0:
        return Chunk(rows, keys, 0, None, None, None)
    size, heads, blocks = tables.block_size, tables.shape.heads, tables.kept.shape[2]
    batch = rows // (heads * blocks) if len(tables.low) > 1 else torch.zeros_like(rows)
    missing = blocks * size - tables.low.shape[1]
    edges = torch.stack([torch.nn.functional.pad(edge, (0, missing)) for edge in (tables.low, tables.high)], 1)
    bounds = edges.unflatten(2, (blocks, size))[batch, :, rows % blocks]
    starts = columns[:, columns.shape[1] - partial :] * size
    dead = None
    if partial == columns.shape[1]:
        blind = ~_visible(bounds, starts, size).any(-1)
        dead = blind if bool(blind.any()) else None
    return Chunk(rows, keys, partial, bounds, starts, dead)


def _visible(bounds: Tensor, starts: Tensor, size: int) -> Tensor:
    """Return which keys of the partial blocks each query sees: [r, size, partial * size]."""
    keys = (starts[:, :, None] + torch.arange(size)).flatten(1)[:, None]
    low, high = bounds[:, 0, :, None], bounds[:, 1, :, None]
    return (keys >= low) & (keys < high)


def _bias(chunk: Chunk, size: int, dtype: torch.dtype) -> Tensor | None:
    if chunk.bounds is None or chunk.starts is None:
        return None
    bias = torch.zeros((len(chunk.keys), 1, size, chunk.keys.shape[1] * size), dtype=dtype)
    hidden = ~_visible(chunk.bounds, chunk.starts, size)
    bias[:, 0, :, -hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    return bias


def pair(plan_of: Callable[[torch.device], CpuPlan], scale: float) -> Partial:
    """Return (forward, backward) on parts of a larger whole; q [b, h, t, d], k [b, g, s, d], v [b, g, s, d]."""
    return (
        lambda q, k, v: forward(q, k, v, plan_of(q.device), scale),
        lambda q, k, v, out, lse, dout: backward(q, k, v, out, lse, dout, plan_of(q.device), scale),
    )


def forward(q: Tensor, k: Tensor, v: Tensor, plan: CpuPlan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend: q [b, h, t, d], k, v [b, g, s, d] -> out [b, h, t, d], lse [b, h, t] in the precision of the softmax."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, keys, values = (_cut(x, plan.size, n) for x, n in zip((q, k, v), (plan.blocks[0], *[plan.blocks[1]] * 2)))
    out, lse = torch.zeros_like(rows), torch.full(rows.shape[:2], float("-inf"), dtype=wide)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for chunk in plan.chunks:
        gathered = [x[chunk.keys].flatten(1, 2)[:, None] for x in (keys, values)]
        bias = _bias(chunk, plan.size, wide)
        part, part_lse = operator(rows[chunk.queries][:, None], *gathered, 0.0, False, attn_mask=bias, scale=scale)
        part, part_lse = part[:, 0], part_lse[:, 0].to(wide)
        if chunk.dead is not None:
            part_lse = part_lse.masked_fill(chunk.dead, float("-inf"))
        out[chunk.queries], lse[chunk.queries] = part, part_lse
    tokens = q.shape[2]
    return _joined(out, q.shape[:2])[:, :, :tokens], _joined(lse, q.shape[:2])[:, :, :tokens]


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, plan: CpuPlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); `out` and `lse` may be those of a larger whole."""
    wide = torch.promote_types(q.dtype, torch.float32)
    finite = lse.to(wide).masked_fill(lse == float("-inf"), 0.0)
    counts = (plan.blocks[0], plan.blocks[1], plan.blocks[1], plan.blocks[0], plan.blocks[0])
    rows, keys, values, outs, douts = (_cut(x, plan.size, n) for x, n in zip((q, k, v, out, dout), counts))
    lses = _cut(finite[..., None], plan.size, plan.blocks[0])[..., 0]
    dq, dk, dv = torch.zeros_like(rows), torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for chunk in plan.chunks:
        gathered = [x[chunk.keys].flatten(1, 2)[:, None] for x in (keys, values)]
        bias = _bias(chunk, plan.size, wide)
        own_dout, own, own_out, own_lse = (x[chunk.queries][:, None] for x in (douts, rows, outs, lses))
        part_q, part_k, part_v = operator(
            own_dout, own, *gathered, own_out, own_lse, 0.0, False, attn_mask=bias, scale=scale
        )
        dq[chunk.queries] = part_q[:, 0]
        for total, part in ((dk, part_k), (dv, part_v)):
            total.index_add_(0, chunk.keys.flatten(), part[:, 0].unflatten(1, (-1, plan.size)).flatten(0, 1).to(wide))
    joined = (_joined(grad, like.shape[:2])[:, :, : like.shape[2]] for grad, like in ((dq, q), (dk, k), (dv, v)))
    dq, dk, dv = (grad.to(q.dtype) for grad in joined)
    return dq, dk, dv


def _cut(x: Tensor, size: int, blocks: int) -> Tensor:
    """Cut [b, h, tokens, d] into [b * h * blocks, size, d], the last block filled up with zeros."""
    missing = blocks * size - x.shape[2]
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    return x.reshape(-1, size, x.shape[3])


def _joined(blocks: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Join what `_cut` cut, without removing the zeros of the last block."""
    return blocks.reshape(*lead, -1, *blocks.shape[2:])
