"""Triton kernels over KV caches, contiguous or in pages: a share of each sequence's keys, and the shares merged.

All query heads that share a key head are rows of one tile, so a key is read once. The shares of a sequence are equal
parts of what it really holds: lengths are read on the device. Slots behind the end are not read, nor entries of the
block table behind the last page. Logits are in base 2 from the soft cap on. This module imports Triton.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent: a series near 0, where 1 - 2 / (exp(2x) + 1) has no digits left."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(tl.abs(x) < 0.125, near, far)


@triton.jit
def tokens_at(table, start, places, live, PAGE: tl.constexpr, TILE_N: tl.constexpr):
    """Return in which page or sequence (0: the sequence itself) the tokens of a tile lie, and at which place of it."""
    if PAGE == 0:
        return tl.zeros([TILE_N], tl.int64), places
    elif PAGE % TILE_N == 0:  # noqa: RET505 - a tile begins at a multiple of its size, so it lies in one page
        return tl.zeros([TILE_N], tl.int64) + tl.load(table + start // PAGE), places % PAGE
    else:
        return tl.load(table + places // PAGE, mask=live, other=0).to(tl.int64), places % PAGE


@triton.jit
def decode_part(
    q, k, v, lengths, table, out, lse, scale, softcap, left, queries, kv_heads, capacity,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_row,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Compute out [share, b, n, h, e] and lse [share, b, h, n] of one share of a sequence's keys, for one key head.

    PAGE is the number of tokens of a page, 0 for a contiguous cache, whose "page" is the sequence.
    """
    batch, group = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    share, shares = tl.program_id(1), tl.num_programs(1)
    length = capacity
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths + batch).to(tl.int32), capacity)
    rows = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    query, head = rows // GROUP, group * GROUP + rows % GROUP
    inside = rows < queries * GROUP
    last = length - 1
    if CAUSAL:
        last = length - queries + query
    low = 0
    if WINDOW:
        low = tl.maximum(length - queries - left, 0) // TILE_N * TILE_N
    span = tl.cdiv(tl.cdiv(tl.maximum(length - low, 0), shares), TILE_N) * TILE_N
    start = low + share * span
    stop = tl.minimum(start + span, length)
    dims, v_dims = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    rows_at = batch.to(tl.int64) * q_batch + query * q_token + head * q_head
    wanted = inside[:, None] & (dims < DIM)[None, :]
    tile_q = tl.load(q + rows_at[:, None] + dims[None, :], mask=wanted, other=0.0)
    k += group.to(tl.int64) * k_head
    v += group.to(tl.int64) * v_head
    if PAGE == 0:
        k += batch.to(tl.int64) * k_page
        v += batch.to(tl.int64) * v_page
    else:
        table += batch.to(tl.int64) * table_row
    acc = tl.zeros([TILE_M, V_WIDTH], tl.float32)
    top = tl.full([TILE_M], -float("inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    for first in tl.range(start, stop, TILE_N):
        places = first + tl.arange(0, TILE_N)
        live = places < stop
        page, at = tokens_at(table, first, places, live, PAGE, TILE_N)
        at = at.to(tl.int64)
        keys = tl.load(
            k + (page * k_page + at * k_token)[:, None] + dims[None, :],
            mask=live[:, None] & (dims < DIM)[None, :], other=0.0,
        )  # fmt: skip
        logits = tl.dot(tile_q, keys.T, input_precision="ieee") * scale
        if SOFTCAP:
            logits = tanh(logits / softcap) * softcap
        seen = live[None, :]
        if CAUSAL:
            seen = seen & (places[None, :] <= last[:, None])
            if WINDOW:
                seen = seen & (places[None, :] >= (last - left)[:, None])
        logits = tl.where(seen, logits * LOG2_E, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # A row that has seen nothing yet has no top to subtract.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.math.exp2(logits - base[:, None])
        keep = tl.math.exp2(top - base)
        total = total * keep + tl.sum(weights, 1)
        values = tl.load(
            v + (page * v_page + at * v_token)[:, None] + v_dims[None, :],
            mask=live[:, None] & (v_dims < V_DIM)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        top = new_top
    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    heads = kv_heads * GROUP
    whole = share * (tl.num_programs(0) // kv_heads) + batch
    place = (whole.to(tl.int64) * queries + query) * heads + head
    tl.store(
        out + place[:, None] * V_DIM + v_dims[None, :], acc.to(out.dtype.element_ty),
        mask=inside[:, None] & (v_dims < V_DIM)[None, :],
    )  # fmt: skip
    logs = tl.where(blind, -float("inf"), (top + tl.math.log2(tl.where(blind, 1.0, total))) * LN_2)
    tl.store(lse + (whole.to(tl.int64) * heads + head) * queries + query, logs, mask=inside)


@triton.jit
def decode_merge(
    parts, part_lse, out, lse, queries, heads, rows, shares,
    V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one row: parts [share, b, n, h, e] and part_lse [share, b, h, n], weighted by their LSE."""
    row = tl.program_id(0).to(tl.int64)
    query, head = row // heads % queries, row % heads
    place = (row // heads // queries * heads + head) * queries + query
    number = tl.arange(0, SHARES)
    logs = tl.load(part_lse + number.to(tl.int64) * rows + place, mask=number < shares, other=-float("inf"))
    top = tl.max(logs, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(logs - base), 0)
    blind = total == 0.0
    dims = tl.arange(0, V_WIDTH)
    acc = tl.zeros([V_WIDTH], tl.float32)
    parts += row * V_DIM
    part_lse += place
    for _ in tl.range(0, shares):
        acc += tl.exp(tl.load(part_lse) - base) * tl.load(parts + dims, mask=dims < V_DIM, other=0.0)
        parts += rows * V_DIM
        part_lse += rows
    acc = acc / tl.where(blind, 1.0, total)
    tl.store(out + row * V_DIM + dims, acc.to(out.dtype.element_ty), mask=dims < V_DIM)
    tl.store(lse + place, tl.where(blind, -float("inf"), base + tl.log(tl.where(blind, 1.0, total))))
