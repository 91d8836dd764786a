"""Triton kernel of the forward pass: one program computes a tile of query rows over the kept key blocks of its row.

Logits stay in base 2: the softmax scale times log2(e) is folded into one multiply-add before exp2. Blocks that need no
masking come first in a row's list and run through a loop without it. Tiles are read through tensor descriptors (TMA on
Hopper), which fill up what lies beyond the last token with zeros.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate(order, tiles, heads, batch_rows, head_rows, RATIO: tl.constexpr):
    """Which tile this program computes: (batch, head, tile within the head, its row of blocks in the lists).

    Heads come one after another, so that the keys of few heads are in the cache at a time; within a head `order` puts
    the rows with the most work first. RATIO tiles make a block.
    """
    program = tl.program_id(0)
    head = program // tiles % heads
    batch = program // tiles // heads
    place = program % tiles
    first = batch * batch_rows + head * head_rows
    row = tl.load(order + first + place // RATIO)
    return batch, head, row * RATIO + place % RATIO, first + row


@triton.jit
def visible(start, low, high, WIDTH: tl.constexpr):
    """[rows, WIDTH] which of the keys from `start` on lie within each row's bounds."""
    keys = start + tl.arange(0, WIDTH)
    return (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])


@triton.jit
def _softmax(top, total, logits, scale, MASKED: tl.constexpr):
    """The next part of a running softmax: its weights, by how much what came before shrinks, the new top and total."""
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    # A row that has seen nothing yet has no top to subtract.
    base = tl.where(new_top == -float("inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.math.exp2(logits * scale - base[:, None])
    keep = tl.math.exp2(top - base)
    return weights, keep, new_top, total * keep + tl.sum(weights, 1)


@triton.jit
def _attend(
    acc, top, total, q, k_tiles, v_tiles, columns, first, count, batch, group, low, high, scale,
    SIZE: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on over `count` blocks of a list. A column is read one step before it is needed."""
    STEPS: tl.constexpr = SIZE // TILE_N
    column = tl.load(columns + first)
    for n in tl.range(0, count * STEPS):
        start = column * SIZE + n % STEPS * TILE_N
        column = tl.load(columns + first + (n + 1) // STEPS)
        k = k_tiles.load([batch, group, start, 0]).reshape([TILE_N, DIM])
        logits = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            logits = tl.where(visible(start, low, high, TILE_N), logits, -float("inf"))
        weights, keep, top, total = _softmax(top, total, logits, scale, MASKED)
        v = v_tiles.load([batch, group, start, 0]).reshape([TILE_N, V_DIM])
        acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def _attend_late(
    acc, top, total, q, k_tiles, v_tiles, columns, first, count, batch, group, scale,
    SIZE: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """The same without masking, the product with V taken one step later: it then runs during the next softmax.

    Weights are carried over unrounded: only what is converted inside the loop stays in registers for the product.
    """
    STEPS: tl.constexpr = SIZE // TILE_N
    before = tl.load(columns + first) * SIZE
    column = tl.load(columns + first + 1 // STEPS)
    k = k_tiles.load([batch, group, before, 0]).reshape([TILE_N, DIM])
    weights, keep, top, total = _softmax(top, total, tl.dot(q, k.T, input_precision="ieee"), scale, False)
    for n in tl.range(1, count * STEPS):
        start = column * SIZE + n % STEPS * TILE_N
        column = tl.load(columns + first + (n + 1) // STEPS)
        k = k_tiles.load([batch, group, start, 0]).reshape([TILE_N, DIM])
        v = v_tiles.load([batch, group, before, 0]).reshape([TILE_N, V_DIM])
        logits = tl.dot(q, k.T, input_precision="ieee")
        acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        weights, keep, top, total = _softmax(top, total, logits, scale, False)
        before = start
    v = v_tiles.load([batch, group, before, 0]).reshape([TILE_N, V_DIM])
    return tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee"), top, total


@triton.jit
def block_sparse_forward(
    q_tiles, k_tiles, v_tiles, out_tiles, lse, order, begin, wholes, columns, low, high,
    q_len, heads, tiles, batch_rows, head_rows, batch_bounds, scale,
    SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    GROUP: tl.constexpr, PARTIAL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """scale is the softmax scale times log2(e); lse [b, h, q_len] is written in natural logarithms."""
    batch, head, tile, row = locate(order, tiles, heads, batch_rows, head_rows, SIZE // TILE_M)
    start, end, whole = tl.load(begin + row), tl.load(begin + row + 1), tl.load(wholes + row)
    q = q_tiles.load([batch, head, tile * TILE_M, 0]).reshape([TILE_M, DIM])
    acc = tl.zeros([TILE_M, V_DIM], tl.float32)
    top = tl.full([TILE_M], -float("inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    inside = rows < q_len
    if PARTIAL:
        first = tl.load(low + batch * batch_bounds + rows, mask=inside, other=0)
        last = tl.load(high + batch * batch_bounds + rows, mask=inside, other=0)
        acc, top, total = _attend(
            acc, top, total, q, k_tiles, v_tiles, columns, start + whole, end - start - whole, batch, head // GROUP,
            first, last, scale, SIZE, TILE_N, DIM, V_DIM, True,
        )  # fmt: skip
    if LATE:
        if whole > 0:
            acc, top, total = _attend_late(
                acc, top, total, q, k_tiles, v_tiles, columns, start, whole, batch, head // GROUP, scale,
                SIZE, TILE_N, DIM, V_DIM,
            )  # fmt: skip
    else:
        acc, top, total = _attend(
            acc, top, total, q, k_tiles, v_tiles, columns, start, whole, batch, head // GROUP, 0, 0, scale,
            SIZE, TILE_N, DIM, V_DIM, False,
        )  # fmt: skip
    blind = total == 0.0
    out = acc / tl.where(blind, 1.0, total)[:, None]
    out_tiles.store([batch, head, tile * TILE_M, 0], out.to(q.dtype).reshape([1, 1, TILE_M, V_DIM]))
    seen = (top + tl.math.log2(tl.where(blind, 1.0, total))) * LN_2
    place = (batch * heads + head).to(tl.int64) * q_len + rows
    tl.store(lse + place, tl.where(blind, -float("inf"), seen), mask=inside)
