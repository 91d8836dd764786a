"""Triton kernels of the backward pass: the gradient of Q by rows of blocks, those of K and V by columns.

Each program owns what it writes, so there are no atomics and the same inputs give the same bits; the price is that
logits and dP are computed twice: 7 products a block instead of 5. Where that is not wanted, the kernel over columns
adds the gradient of Q too, atomically in float32: 5 products, and bits that differ from run to run.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.kernels.block_sparse.triton_forward import LOG2_E, locate, visible


@triton.jit
def block_sparse_delta(out_tiles, dout_tiles, delta, q_len, heads, TILE_M: tl.constexpr, V_DIM: tl.constexpr):
    """delta [b, h, q_len] = rowsum(dO * O)."""
    head, tile = tl.program_id(1), tl.program_id(0)
    place = [head // heads, head % heads, tile * TILE_M, 0]
    out = out_tiles.load(place).reshape([TILE_M, V_DIM]).to(tl.float32)
    dout = dout_tiles.load(place).reshape([TILE_M, V_DIM]).to(tl.float32)
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    tl.store(delta + head.to(tl.int64) * q_len + rows, tl.sum(out * dout, 1), mask=rows < q_len)


@triton.jit
def _row_facts(lse, delta, rows, q_len):
    """LSE in base 2 (any finite number for a row that sees nothing) and delta of some rows; 0 beyond the last."""
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
    """dQ of one tile of query rows."""
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
    """Everything here is transposed: keys are rows."""
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
    """dK and dV of one tile of keys, over all query heads of its group. `order` is that of the group's first head.

    dq_sum [b, h, q_len, DIM] float32 receives dQ without the scale where ATOMIC, and is not touched otherwise.
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
