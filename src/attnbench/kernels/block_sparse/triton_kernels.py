"""Triton kernels over the kept blocks of a mask: the forward pass, and the gradients of Q, and of K and V.

Forward: a program computes a tile of query rows over the kept key blocks of its row. Logits stay in base 2: the softmax
scale times log2(e) is folded into one multiply-add before exp2. Blocks that need no masking come first in a row's list
and run through a loop without masking. Tiles are read through tensor descriptors (TMA on Hopper), which fill up with
zeros beyond the last token.

Backward: the gradient of Q by rows of blocks, those of K and V by columns. Each program owns what it writes, so there
are no atomics and the same inputs give the same bits; the price is that logits and dP are computed twice: 7 products
for each block instead of 5. With ATOMIC the kernel over columns adds the gradient of Q too, atomically in float32:
5 products, and bits that differ from run to run.
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
    """Locate the tile of this program: (batch, head, tile within the head, its row of blocks in the lists).

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
    """Return which of the keys from `start` on lie within each row's bounds: [rows, WIDTH]."""
    keys = start + tl.arange(0, WIDTH)
    return (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])


@triton.jit
def _softmax(top, total, logits, scale, MASKED: tl.constexpr):
    """Update a running softmax: (weights, factor by which the sums so far shrink, new top, new total)."""
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
    """Attend to `count` further blocks of a list. A column is read one step before it is needed."""
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
    """Attend without masking, with the product with V taken one step later, so that it runs during the next softmax.

    Weights are carried over unrounded: only values converted inside the loop stay in registers for the product.
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
    """Compute out and lse [b, h, q_len] (natural logarithm) of one tile of query rows; scale includes log2(e)."""
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


@triton.jit
def block_sparse_delta(out_tiles, dout_tiles, delta, q_len, heads, TILE_M: tl.constexpr, V_DIM: tl.constexpr):
    """Compute delta [b, h, q_len] = rowsum(dO * O)."""
    head, tile = tl.program_id(1), tl.program_id(0)
    place = [head // heads, head % heads, tile * TILE_M, 0]
    out = out_tiles.load(place).reshape([TILE_M, V_DIM]).to(tl.float32)
    dout = dout_tiles.load(place).reshape([TILE_M, V_DIM]).to(tl.float32)
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    tl.store(delta + head.to(tl.int64) * q_len + rows, tl.sum(out * dout, 1), mask=rows < q_len)


@triton.jit
def _row_facts(lse, delta, rows, q_len):
    """Load the LSE in base 2 (0 for a row that sees nothing) and delta of some rows; 0 beyond the last row."""
    inside = rows < q_len
    found = tl.load(lse + rows, mask=inside, other=0.0)
    return tl.where(found == -float("inf"), 0.0, found) * LOG2_E, tl.load(delta + rows, mask=inside, other=0.0)


@triton.jit
def _query_gradient(
    dq, q, dout, lse, delta, k_tiles, v_tiles, columns, first, count, batch, group, low, high, scale,
    SIZE: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = SIZE // TILE_N
    column = tl.load(columns + first)
    for n in tl.range(0, count * STEPS):
        start = column * SIZE + n % STEPS * TILE_N
        column = tl.load(columns + first + (n + 1) // STEPS)
        k = k_tiles.load([batch, group, start, 0]).reshape([TILE_N, DIM])
        v = v_tiles.load([batch, group, start, 0]).reshape([TILE_N, V_DIM])
        logits = tl.dot(q, k.T, input_precision="ieee")
        dp = tl.dot(dout, v.T, input_precision="ieee")
        weights = tl.math.exp2(logits * scale - lse[:, None])
        if MASKED:
            weights = tl.where(visible(start, low, high, TILE_N), weights, 0.0)
        ds = weights * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def block_sparse_query_gradient(
    q_tiles, k_tiles, v_tiles, dout_tiles, dq_tiles, lse, delta, order, begin, wholes, columns, low, high,
    q_len, heads, tiles, batch_rows, head_rows, batch_bounds, scale, softmax_scale,
    SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    GROUP: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one tile of query rows."""
    batch, head, tile, row = locate(order, tiles, heads, batch_rows, head_rows, SIZE // TILE_M)
    start, end, whole = tl.load(begin + row), tl.load(begin + row + 1), tl.load(wholes + row)
    place = [batch, head, tile * TILE_M, 0]
    q = q_tiles.load(place).reshape([TILE_M, DIM])
    dout = dout_tiles.load(place).reshape([TILE_M, V_DIM])
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    offset = (batch * heads + head).to(tl.int64) * q_len
    own_lse, own_delta = _row_facts(lse + offset, delta + offset, rows, q_len)
    dq = tl.zeros([TILE_M, DIM], tl.float32)
    dq = _query_gradient(
        dq, q, dout, own_lse, own_delta, k_tiles, v_tiles, columns, start, whole, batch, head // GROUP, 0, 0, scale,
        SIZE, TILE_N, DIM, V_DIM, False,
    )  # fmt: skip
    if PARTIAL:
        inside = rows < q_len
        first = tl.load(low + batch * batch_bounds + rows, mask=inside, other=0)
        last = tl.load(high + batch * batch_bounds + rows, mask=inside, other=0)
        dq = _query_gradient(
            dq, q, dout, own_lse, own_delta, k_tiles, v_tiles, columns, start + whole, end - start - whole, batch,
            head // GROUP, first, last, scale, SIZE, TILE_N, DIM, V_DIM, True,
        )  # fmt: skip
    dq_tiles.store(place, (dq * softmax_scale).to(q.dtype).reshape([1, 1, TILE_M, DIM]))


@triton.jit
def _key_gradients(
    dk, dv, k, v, key, q_tiles, dout_tiles, dq_sum, lse, delta, low, high, columns, first, count, batch, head, q_len,
    scale, SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    ATOMIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add up dK and dV over `count` blocks of a list; everything is transposed: keys are rows."""
    STEPS: tl.constexpr = SIZE // TILE_M
    column = tl.load(columns + first)
    for n in tl.range(0, count * STEPS):
        start = column * SIZE + n % STEPS * TILE_M
        column = tl.load(columns + first + (n + 1) // STEPS)
        rows = start + tl.arange(0, TILE_M)
        q = q_tiles.load([batch, head, start, 0]).reshape([TILE_M, DIM])
        dout = dout_tiles.load([batch, head, start, 0]).reshape([TILE_M, V_DIM])
        own_lse, own_delta = _row_facts(lse, delta, rows, q_len)
        logits = tl.dot(k, q.T, input_precision="ieee")
        dp = tl.dot(v, dout.T, input_precision="ieee")
        weights = tl.math.exp2(logits * scale - own_lse[None, :])
        if MASKED:
            inside = rows < q_len
            from_key = tl.load(low + rows, mask=inside, other=0)
            to_key = tl.load(high + rows, mask=inside, other=0)
            weights = tl.where(tl.trans(visible(key, from_key, to_key, TILE_N)), weights, 0.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = (weights * (dp - own_delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
        if ATOMIC:
            dq = tl.dot(ds.T, k, input_precision="ieee")
            places = dq_sum + rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
            tl.atomic_add(places, dq, mask=(rows < q_len)[:, None], sem="relaxed")
    return dk, dv


@triton.jit
def block_sparse_key_gradients(
    q_tiles, k_tiles, v_tiles, dout_tiles, dk_tiles, dv_tiles, dq_sum, lse, delta,
    order, begin, wholes, columns, low, high,
    q_len, kv_heads, tiles, batch_rows, head_rows, batch_bounds, scale, softmax_scale,
    SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    GROUP: tl.constexpr, PARTIAL: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one tile of keys, over all query heads of its group, in the order of the first of them.

    If ATOMIC, dq_sum [b, h, q_len, DIM] float32 receives dQ without the scale; otherwise it is not used.
    """
    batch, group, tile, row = locate(order, tiles, kv_heads, batch_rows, head_rows * GROUP, SIZE // TILE_N)
    place = [batch, group, tile * TILE_N, 0]
    k = k_tiles.load(place).reshape([TILE_N, DIM])
    v = v_tiles.load(place).reshape([TILE_N, V_DIM])
    dk = tl.zeros([TILE_N, DIM], tl.float32)
    dv = tl.zeros([TILE_N, V_DIM], tl.float32)
    own_low, own_high = low + batch * batch_bounds, high + batch * batch_bounds
    for member in range(GROUP):
        head = group * GROUP + member
        offset = (batch * kv_heads * GROUP + head).to(tl.int64) * q_len
        line = row + member * head_rows
        start, end, whole = tl.load(begin + line), tl.load(begin + line + 1), tl.load(wholes + line)
        dk, dv = _key_gradients(
            dk, dv, k, v, tile * TILE_N, q_tiles, dout_tiles, dq_sum + offset * DIM, lse + offset, delta + offset,
            own_low, own_high, columns, start, whole, batch, head, q_len, scale,
            SIZE, TILE_M, TILE_N, DIM, V_DIM, ATOMIC, False,
        )  # fmt: skip
        if PARTIAL:
            dk, dv = _key_gradients(
                dk, dv, k, v, tile * TILE_N, q_tiles, dout_tiles, dq_sum + offset * DIM, lse + offset, delta + offset,
                own_low, own_high, columns, start + whole, end - start - whole, batch, head, q_len, scale,
                SIZE, TILE_M, TILE_N, DIM, V_DIM, ATOMIC, True,
            )  # fmt: skip
    dk_tiles.store(place, (dk * softmax_scale).to(k.dtype).reshape([1, 1, TILE_N, DIM]))
    dv_tiles.store(place, dv.to(v.dtype).reshape([1, 1, TILE_N, V_DIM]))
