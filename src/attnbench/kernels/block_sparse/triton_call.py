"""Launches of the Triton kernels: tables laid out once for a mask, descriptors and grids made for each call."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.kernels.block_sparse.tables import BlockLists, BlockTables
from attnbench.kernels.block_sparse.tiles import TileShape
from attnbench.kernels.block_sparse.triton_kernels import (
    LOG2_E,
    block_sparse_delta,
    block_sparse_forward,
    block_sparse_key_gradients,
    block_sparse_query_gradient,
)

DELTA_ROWS = 64
SMALLEST_DIM = 16


class Ordered(NamedTuple):
    """Lists, and for each plane of them the rows with the most blocks first."""

    lists: BlockLists
    order: torch.Tensor

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """Arguments of the kernels, in their order."""
        return (self.order, *self.lists)


class TritonPlan(NamedTuple):
    """Tables and orders of work, made once for a mask on a device."""

    tables: BlockTables
    rows: Ordered
    columns: Ordered
    partial: bool
    """Whether any block needs masking."""

    def strides(self, axis: int) -> tuple[int, int]:
        """Return how many rows (axis 2) or columns (axis 3) of blocks lie between batch rows, and between heads."""
        batch, heads = self.tables.kept.shape[:2]
        count = self.tables.kept.shape[axis]
        return count * heads * (batch > 1), count * (heads > 1)


def plan(tables: BlockTables, group: int) -> TritonPlan:
    """Make lists and orders; columns of a group of query heads are ordered by their common work."""
    kept = tables.kept
    by_row, by_column = (kept.sum(axis) for axis in (3, 2))
    if kept.shape[1] > 1:
        by_column = by_column.unflatten(1, (-1, group)).sum(2).repeat_interleave(group, 1)
    orders = (work.argsort(dim=-1, descending=True, stable=True).int().contiguous() for work in (by_row, by_column))
    rows, columns = (Ordered(lists, order) for lists, order in zip((tables.by_row, tables.by_column), orders))
    return TritonPlan(tables, rows, columns, bool((kept & ~tables.whole).any()))


def pair(
    plan_of: Callable[[torch.device], TritonPlan], scale: float, tiles: Mapping[str, TileShape], atomic: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return (forward, backward) on parts of a larger whole; q [b, h, t, d], k [b, g, s, d], v [b, g, s, e].

    If `atomic`, the kernel over columns adds up the gradient of Q.
    """
    return (
        lambda q, k, v: _forward(plan_of(q.device), q, k, v, scale, tiles["forward"]),
        lambda *saved: _backward(plan_of(saved[0].device), saved, scale, tiles, atomic),
    )


def _forward(
    plan: TritonPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, tile: TileShape
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, q_len, _), size = q.shape, plan.tables.block_size
    tile = tile.fitted(size)
    out = torch.empty((batch, heads, q_len, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
    count = plan.tables.kept.shape[2] * (size // tile.rows)
    block_sparse_forward[(batch * heads * count,)](
        _tiles(q, tile.rows), _tiles(k, tile.keys), _tiles(v, tile.keys), _tiles(out, tile.rows), lse,
        *plan.rows.pointers, plan.tables.low, plan.tables.high,
        q_len, heads, count, *plan.strides(2), _bounds_stride(plan), scale * LOG2_E.value,
        LATE=tile.late, **_constants(plan, tile, q, k, v),
    )  # fmt: skip
    return out, lse


def _backward(
    plan: TritonPlan, saved: tuple[torch.Tensor, ...], scale: float, tiles: Mapping[str, TileShape], atomic: bool
) -> tuple[torch.Tensor, ...]:
    q, k, v, out, lse, dout = saved
    batch, heads, q_len, _ = q.shape
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    block_sparse_delta[(triton.cdiv(q_len, DELTA_ROWS), batch * heads)](
        _tiles(out, DELTA_ROWS), _tiles(dout, DELTA_ROWS), delta, q_len, heads, TILE_M=DELTA_ROWS, V_DIM=_width(v)
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inputs, facts = (q, k, v, dout), (lse, delta)
    if not atomic:
        _query_gradient(plan, inputs, facts, dq, scale, tiles["query"])
        _key_gradients(plan, inputs, facts, (dk, dv), None, scale, tiles["key"])
        return dq, dk, dv
    dq_sum = torch.zeros((batch, heads, q_len, _width(q)), dtype=torch.float32, device=q.device)
    _key_gradients(plan, inputs, facts, (dk, dv), dq_sum, scale, tiles["key"])
    return torch.mul(dq_sum[..., : q.shape[3]], scale, out=dq), dk, dv


def _query_gradient(
    plan: TritonPlan, inputs: tuple[torch.Tensor, ...], facts: tuple[torch.Tensor, ...], dq: torch.Tensor, scale: float,
    tile: TileShape,
) -> None:  # fmt: skip
    q, k, v, dout = inputs
    tile = tile.fitted(plan.tables.block_size)
    count = plan.tables.kept.shape[2] * (plan.tables.block_size // tile.rows)
    block_sparse_query_gradient[(q.shape[0] * q.shape[1] * count,)](
        _tiles(q, tile.rows), _tiles(k, tile.keys), _tiles(v, tile.keys), _tiles(dout, tile.rows),
        _tiles(dq, tile.rows), *facts, *plan.rows.pointers, plan.tables.low, plan.tables.high,
        q.shape[2], q.shape[1], count, *plan.strides(2), _bounds_stride(plan), scale * LOG2_E.value, scale,
        **_constants(plan, tile, q, k, v),
    )  # fmt: skip


def _key_gradients(
    plan: TritonPlan, inputs: tuple[torch.Tensor, ...], facts: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor, ...], dq_sum: torch.Tensor | None, scale: float, tile: TileShape,
) -> None:  # fmt: skip
    q, k, v, dout = inputs
    tile = tile.fitted(plan.tables.block_size)
    count = plan.tables.kept.shape[3] * (plan.tables.block_size // tile.keys)
    block_sparse_key_gradients[(k.shape[0] * k.shape[1] * count,)](
        _tiles(q, tile.rows), _tiles(k, tile.keys), _tiles(v, tile.keys), _tiles(dout, tile.rows),
        *(_tiles(grad, tile.keys) for grad in grads), facts[1] if dq_sum is None else dq_sum, *facts,
        *plan.columns.pointers, plan.tables.low, plan.tables.high,
        q.shape[2], k.shape[1], count, *plan.strides(3), _bounds_stride(plan), scale * LOG2_E.value, scale,
        ATOMIC=dq_sum is not None, **_constants(plan, tile, q, k, v),
    )  # fmt: skip


def _bounds_stride(plan: TritonPlan) -> int:
    return plan.tables.low.shape[1] * (len(plan.tables.low) > 1)


def _constants(plan: TritonPlan, tile: TileShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    return {
        "SIZE": plan.tables.block_size,
        "TILE_M": tile.rows,
        "TILE_N": tile.keys,
        "DIM": _width(q),
        "V_DIM": _width(v),
        "GROUP": q.shape[1] // k.shape[1],
        "PARTIAL": plan.partial,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _width(x: torch.Tensor) -> int:
    return max(SMALLEST_DIM, 1 << (x.shape[3] - 1).bit_length())


def _tiles(x: torch.Tensor, tokens: int) -> TensorDescriptor:
    """Describe [b, h, tokens, d] as tiles of one head; copy it if TMA does not take its strides or its address."""
    aligned = x.data_ptr() % 16 == 0
    if x.stride(3) != 1 or not aligned or any(stride * x.itemsize % 16 or stride == 0 for stride in _outer_strides(x)):
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(x, list(x.shape), [*_outer_strides(x), 1], [1, 1, tokens, _width(x)])


def _outer_strides(x: torch.Tensor) -> list[int]:
    """Return the strides of the first three axes; an axis of one element may have any, so it gets a valid one."""
    harmless = x.shape[1] * x.shape[2] * x.shape[3]
    return [x.stride(axis) if x.shape[axis] > 1 else harmless for axis in range(3)]
