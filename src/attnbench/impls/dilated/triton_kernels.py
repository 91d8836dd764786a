"""Triton kernels that read every branch's partial result where it lies and write the whole once.

One program has a block of tokens of one head of one batch row. Imported on first use, since it needs Triton.

A partial result is a dense array of its own; the table says where its rows lie, int64 [batch * heads, branches,
strands, 2, 8]: a strand is one offset of a branch; its two entries are whole segments and the shorter one at the end.
Fields: its first row, counted in numbers from `out`; numbers between stacked segments and between rows; the same three
of its LSE, from `lse`; the offset; whether there is anything.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _field(entry, rest, has_rest: tl.constexpr, index: tl.constexpr):  # noqa: ANN001, ANN202
    """A field of the whole segments' entry, or of the rest's where `rest`."""
    value = tl.load(entry + index)
    if has_rest:
        value = tl.where(rest, tl.load(entry + 8 + index), value)
    return value


@triton.jit
def merge_kernel(  # noqa: ANN201
    table,  # noqa: ANN001
    out,  # noqa: ANN001
    lse,  # noqa: ANN001
    tokens,  # noqa: ANN001
    heads,  # noqa: ANN001
    WIDTHS: tl.constexpr,
    RATES: tl.constexpr,
    RESTS: tl.constexpr,
    BRANCHES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [b, s, h, d] and lse [b, s, h] of all branches, by a running softmax over their LSEs in float32."""
    place = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_DIM)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    merged = tl.zeros((BLOCK, BLOCK_DIM), tl.float32)
    for branch in tl.static_range(BRANCHES):
        segment, inside = token // WIDTHS[branch], token % WIDTHS[branch]
        rest = segment >= tokens // WIDTHS[branch]
        nth, stacked = (inside // RATES[branch]).to(tl.int64), tl.where(rest, 0, segment).to(tl.int64)
        entry = table + (place * BRANCHES + branch).to(tl.int64) * 16
        held = (inside % RATES[branch]).to(tl.int64) == _field(entry, rest, RESTS[branch], 6)
        held = held & (token < tokens) & (_field(entry, rest, RESTS[branch], 7) != 0)
        number = _field(entry, rest, RESTS[branch], 3) + nth * _field(entry, rest, RESTS[branch], 5)
        number += stacked * _field(entry, rest, RESTS[branch], 4)
        weight = tl.load(lse + number, mask=held, other=float("-inf"))
        row = _field(entry, rest, RESTS[branch], 0) + nth * _field(entry, rest, RESTS[branch], 2)
        row = tl.multiple_of(row + stacked * _field(entry, rest, RESTS[branch], 1), [ALIGN])
        part = tl.load(out + row[:, None] + column[None, :], mask=held[:, None] & (column < DIM)[None, :], other=0.0)
        higher = tl.maximum(top, weight)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp(top - base), tl.exp(weight - base)
        merged = merged * kept[:, None] + part.to(tl.float32) * added[:, None]
        total, top = total * kept + added, higher
    seen = total > 0
    merged = merged * (1.0 / tl.where(seen, total, 1.0))[:, None]
    cell = ((place // heads).to(tl.int64) * tokens + token) * heads + place % heads
    tl.store(lse + cell, tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf")), mask=token < tokens)
    target = out + tl.multiple_of(cell * DIM, [ALIGN])[:, None] + column[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < DIM)[None, :])


@triton.jit
def add_kernel(  # noqa: ANN201
    table,  # noqa: ANN001
    out,  # noqa: ANN001
    tokens,  # noqa: ANN001
    heads,  # noqa: ANN001
    WIDTHS: tl.constexpr,
    RATES: tl.constexpr,
    RESTS: tl.constexpr,
    BRANCHES: tl.constexpr,
    STRANDS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [b, s, h, d]: the sum of all branches' gradients, in float32."""
    place = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_DIM)
    total = tl.zeros((BLOCK, BLOCK_DIM), tl.float32)
    for branch in tl.static_range(BRANCHES):
        segment, inside = token // WIDTHS[branch], token % WIDTHS[branch]
        rest = segment >= tokens // WIDTHS[branch]
        nth, stacked = (inside // RATES[branch]).to(tl.int64), tl.where(rest, 0, segment).to(tl.int64)
        residue = (inside % RATES[branch]).to(tl.int64)
        for strand in tl.static_range(STRANDS):
            entry = table + ((place * BRANCHES + branch) * STRANDS + strand).to(tl.int64) * 16
            held = (residue == _field(entry, rest, RESTS[branch], 6)) & (token < tokens)
            held = held & (_field(entry, rest, RESTS[branch], 7) != 0)
            row = _field(entry, rest, RESTS[branch], 0) + nth * _field(entry, rest, RESTS[branch], 2)
            row = tl.multiple_of(row + stacked * _field(entry, rest, RESTS[branch], 1), [ALIGN])
            mask = held[:, None] & (column < DIM)[None, :]
            total += tl.load(out + row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    cell = ((place // heads).to(tl.int64) * tokens + token) * heads + place % heads
    target = out + tl.multiple_of(cell * DIM, [ALIGN])[:, None] + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < DIM)[None, :])
