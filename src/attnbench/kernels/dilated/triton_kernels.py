"""Triton kernels that read every branch's partial result where it lies and write the whole once.

One program computes a block of tokens of one head of one batch row. This module imports Triton.

A partial result is a dense array of its own. A table, int64 [batch * heads, branches, strands, 2, 8], says where its
rows lie. A strand is one offset of a branch; its two entries are the whole segments and the shorter segment at the end.
The fields of an entry: its first row, counted in numbers from `out`; the numbers between stacked segments and between
rows; the same three for its LSE, from `lse`; the offset; the partial result's number from 1 on, or 0 if there is none.

What depends on shapes alone is made once, with first rows counted from the partial result's own beginning;
`place_kernel` adds where the results of this call lie, so nothing is copied from the host.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _apart(part, whole):
    """Return how many numbers lie between the beginnings of two arrays of one type."""
    size: tl.constexpr = part.dtype.element_ty.primitive_bitwidth // 8
    return (part.to(tl.int64) - whole.to(tl.int64)) // size


@triton.jit
def place_kernel(
    source, table, entries, parts, wholes, FIRST: tl.constexpr, PIECES: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of this call. `parts` are numbered from FIRST on; each of `wholes` has PIECES of them.

    With HAS_LSE every piece has a second array, its LSE, numbered PIECES later; fields 3 to 5 are its place.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < entries
    number = tl.load(source + entry * 8 + 7, mask=real, other=0)
    row = tl.load(source + entry * 8, mask=real, other=0)
    lse = tl.load(source + entry * 8 + 3, mask=real, other=0)
    for nth in tl.static_range(len(parts)):  # pyright: ignore[reportGeneralTypeIssues]
        distance = _apart(parts[nth], wholes[(FIRST + nth) // PIECES])
        row += tl.where(number == FIRST + nth + 1, distance, 0)
        if HAS_LSE:
            lse += tl.where((number > 0) & (number + PIECES == FIRST + nth + 1), distance, 0)
    for field in tl.static_range(1, 8):  # pyright: ignore[reportGeneralTypeIssues]
        if field != 3:
            value = tl.load(source + entry * 8 + field, mask=real, other=0)
            tl.store(table + entry * 8 + field, value, mask=real)
    tl.store(table + entry * 8, row, mask=real)
    tl.store(table + entry * 8 + 3, lse, mask=real)


@triton.jit
def _field(entry, rest, has_rest: tl.constexpr, index: tl.constexpr):
    """Load a field of the entry of whole segments, or of the shorter segment's entry if `rest`."""
    value = tl.load(entry + index)
    if has_rest:
        value = tl.where(rest, tl.load(entry + 8 + index), value)
    return value


@triton.jit
def _held(entry, token, tokens, width: tl.constexpr, rate: tl.constexpr, has_rest: tl.constexpr):
    """Locate tokens: (whether the entry has it, whether its segment is the shorter one, its place in the segment,
    the segment's place in the stack)."""
    segment, inside = token // width, token % width
    rest = segment >= tokens // width
    nth, stacked = (inside // rate).to(tl.int64), tl.where(rest, 0, segment).to(tl.int64)
    held = (inside % rate).to(tl.int64) == _field(entry, rest, has_rest, 6)
    return held & (token < tokens) & (_field(entry, rest, has_rest, 7) != 0), rest, nth, stacked


@triton.jit
def _row(entry, rest, nth, stacked, has_rest: tl.constexpr, first: tl.constexpr, align: tl.constexpr):
    """Return where the rows of `_held` lie, by the three fields from `first` on: at multiples of `align`.

    The hint about multiples stands here because the compiler drops hints about the result of a call.
    """
    row = _field(entry, rest, has_rest, first) + nth * _field(entry, rest, has_rest, first + 2)
    return tl.multiple_of(row + stacked * _field(entry, rest, has_rest, first + 1), [align])


@triton.jit
def merge_kernel(
    table, out, lse, tokens, heads, WIDTHS: tl.constexpr, RATES: tl.constexpr, RESTS: tl.constexpr,
    BRANCHES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Merge all branches into out [b, s, h, d] and lse [b, s, h], by a running softmax over their LSEs in float32.

    With KEEP the whole's LSE also overwrites the LSE of every partial result, whose backward pass needs it there.
    """
    place = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_DIM)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    merged = tl.zeros((BLOCK, BLOCK_DIM), tl.float32)
    for branch in tl.static_range(BRANCHES):
        entry = table + (place * BRANCHES + branch).to(tl.int64) * 16
        held, rest, nth, stacked = _held(entry, token, tokens, WIDTHS[branch], RATES[branch], RESTS[branch])
        number = _row(entry, rest, nth, stacked, RESTS[branch], 3, 1)
        weight = tl.load(lse + number, mask=held, other=float("-inf"))
        row = _row(entry, rest, nth, stacked, RESTS[branch], 0, ALIGN)
        part = tl.load(out + row[:, None] + column[None, :], mask=held[:, None] & (column < DIM)[None, :], other=0.0)
        higher = tl.maximum(top, weight)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp(top - base), tl.exp(weight - base)
        merged = merged * kept[:, None] + part.to(tl.float32) * added[:, None]
        total, top = total * kept + added, higher
    seen = total > 0
    merged = merged * (1.0 / tl.where(seen, total, 1.0))[:, None]
    cell = ((place // heads).to(tl.int64) * tokens + token) * heads + place % heads
    whole = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + cell, whole, mask=token < tokens)
    target = out + tl.multiple_of(cell * DIM, [ALIGN])[:, None] + column[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < DIM)[None, :])
    if KEEP:
        tl.debug_barrier()  # warps may hold the same rows: all have read before one writes
        for branch in tl.static_range(BRANCHES):
            entry = table + (place * BRANCHES + branch).to(tl.int64) * 16
            held, rest, nth, stacked = _held(entry, token, tokens, WIDTHS[branch], RATES[branch], RESTS[branch])
            tl.store(lse + _row(entry, rest, nth, stacked, RESTS[branch], 3, 1), whole, mask=held)


@triton.jit
def add_kernel(
    table, first, second, third, tokens, heads, WIDTHS: tl.constexpr, RATES: tl.constexpr, RESTS: tl.constexpr,
    BRANCHES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    STRANDS: tl.constexpr,
):  # fmt: skip
    """Sum all branches' gradients, in float32, into arrays [b, s, h, d], as many as the grid is deep."""
    nth_array = tl.program_id(2)
    out = tl.where(nth_array == 0, first, tl.where(nth_array == 1, second, third))
    place = tl.program_id(1)
    table += nth_array.to(tl.int64) * tl.num_programs(1) * BRANCHES * STRANDS * 16
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_DIM)
    total = tl.zeros((BLOCK, BLOCK_DIM), tl.float32)
    for branch in tl.static_range(BRANCHES):
        for strand in tl.static_range(STRANDS):  # pyright: ignore[reportGeneralTypeIssues]
            entry = table + ((place * BRANCHES + branch) * STRANDS + strand).to(tl.int64) * 16
            held, rest, nth, stacked = _held(entry, token, tokens, WIDTHS[branch], RATES[branch], RESTS[branch])
            row = _row(entry, rest, nth, stacked, RESTS[branch], 0, ALIGN)
            mask = held[:, None] & (column < DIM)[None, :]
            total += tl.load(out + row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    cell = ((place // heads).to(tl.int64) * tokens + token) * heads + place % heads
    target = out + tl.multiple_of(cell * DIM, [ALIGN])[:, None] + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < DIM)[None, :])
