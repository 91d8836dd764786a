"""A dilated pattern as dense calls: which tokens and heads of [b, s, h, d] each call reads, as one strided view.

Pure arithmetic, no arrays. Head h of a branch of rate r keeps tokens offset(h), offset(h) + r, ... of each segment:

- Segments of equal length stack as the batch of one call; with whole segments only, batch rows stack too.
- Heads of one offset are one call (`shift` 0). Without grouped heads, neighbouring offsets are one call as well: head n
  starts n tokens later, a diagonal that is still one stride (`shift` 1). Whichever needs fewer calls is taken.
- Keys beyond a row's length are left out; queries there remain, and see the keys that are left.
- `Task` adds scale and options to a problem; `problem_of` reads a workload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from attnbench.masks import Causal, Dilated, Lengths
from attnbench.spec import Workload


class Heads(NamedTuple):
    """Heads first, first + step, ... of one call; its n-th starts at token offset + n * shift of a segment."""

    first: int
    step: int
    number: int
    kv_first: int
    kv_step: int
    kv_number: int
    offset: int
    shift: int


class Piece(NamedTuple):
    """One dense call: `stack` segments, `apart` tokens from one to the next, from token `start` of batch row `row`."""

    branch: int
    heads: Heads
    row: int
    start: int
    stack: int
    apart: int
    rate: int
    skip: int
    """Queries left out at the front, which belong to another piece; keys always begin at the first."""
    queries: int
    keys: int
    causal: bool


class Problem(NamedTuple):
    """A dilated pattern over arrays of a given shape; `lengths` are the key lengths of the batch rows, or None."""

    pattern: Dilated
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    causal: bool
    lengths: tuple[int, ...] | None = None


class _Segments(NamedTuple):
    """Equal segments of one or more batch rows: their place and how many queries and keys each holds."""

    row: int
    start: int
    stack: int
    apart: int
    queries: int
    keys: int


@lru_cache(maxsize=256)
def pieces(problem: Problem, fold: bool = True, diagonal: bool = True) -> tuple[Piece, ...]:
    """Return the dense calls, branch by branch; together they hold every pair exactly as often as the pattern does.

    `fold`: batch rows follow each other in memory as segments do. `diagonal`: heads of several offsets share calls.
    """
    found: list[Piece] = []
    for branch, (width, rate) in enumerate(zip(problem.pattern.segment_lengths, problem.pattern.dilation_rates)):
        for segments in _segments(problem, width, fold):
            for heads in _head_sets(problem, rate, segments, diagonal):
                found += _calls(problem, branch, rate, segments, heads)
    return tuple(found)


def computed_pairs(problem: Problem) -> int:
    """Count the pairs that the pieces compute, over all batch rows and heads: a pair in two branches counts twice."""
    total = 0
    for piece in pieces(problem):
        square = piece.queries * (piece.queries + 1) // 2
        total += piece.stack * piece.heads.number * (square if piece.causal else piece.queries * piece.keys)
    return total


def _segments(problem: Problem, width: int, fold: bool) -> Iterator[_Segments]:
    tokens, batch = problem.tokens, problem.batch
    whole, rest = divmod(tokens, width)
    if problem.lengths is None and fold and (rest == 0 or whole <= 1 or batch == 1):
        # Whole segments stack over batch rows too when rows end where a segment ends, or hold one segment each.
        if whole:
            stack = (whole, width) if batch == 1 else (batch, tokens) if whole == 1 else (batch * whole, width)
            yield _Segments(0, 0, *stack, width, width)
        if rest:
            yield _Segments(0, whole * width, batch, tokens, rest, rest)
        return
    lengths = problem.lengths or (tokens,) * batch
    for row, length in enumerate(min(length, tokens) for length in lengths):
        full = length // width
        if full:
            yield _Segments(row, 0, full, width, width, width)
        start = full * width
        if length > start:
            yield _Segments(row, start, 1, width, min(width, tokens - start), length - start)


def _head_sets(problem: Problem, rate: int, segments: _Segments, diagonal: bool) -> list[Heads]:
    heads, group = problem.heads, problem.heads // problem.kv_heads
    offsets = [problem.pattern.head_offset(head, rate, heads) for head in range(heads)]
    by_offset = [
        run
        for offset in sorted(set(offsets))
        if offset < segments.keys
        for run in _same_offset([head for head in range(heads) if offsets[head] == offset], group, offset)
    ]
    if not diagonal or group > 1:
        return by_offset
    diagonals = list(_diagonals(offsets, rate, segments))
    return diagonals if len(diagonals) < len(by_offset) else by_offset


def _same_offset(members: Sequence[int], group: int, offset: int) -> Iterator[Heads]:
    """Yield runs of heads for grouped calls: key/value heads evenly spaced, each shared by equally many query heads."""
    blocks = [list(block) for _, block in groupby(members, key=lambda head: head // group)]
    step = members[1] - members[0] if len(members) > 1 else 1
    while blocks:
        run = blocks[:1]
        kv_step = blocks[1][0] // group - run[0][0] // group if len(blocks) > 1 else 1
        for block in blocks[1:]:
            if len(block) != len(run[0]) or block[0] // group - run[-1][0] // group != kv_step:
                break
            run.append(block)
        blocks = blocks[len(run) :]
        yield Heads(run[0][0], step, sum(map(len, run)), run[0][0] // group, kv_step, len(run), offset, 0)


def _diagonals(offsets: Sequence[int], rate: int, segments: _Segments) -> Iterator[Heads]:
    """Yield runs of heads of offsets 0, 1, 2, ..., one of each, that keep equally many tokens."""
    rank = {head: offsets[:head].count(offset) for head, offset in enumerate(offsets)}
    for nth in range(max(rank.values()) + 1):
        line = sorted((head for head in rank if rank[head] == nth), key=lambda head: offsets[head])
        for _, run in groupby(line, key=lambda head: _counts(offsets[head], rate, segments)):
            members = list(run)
            first, offset = members[0], offsets[members[0]]
            step = members[1] - first if len(members) > 1 else 1
            if offset < segments.keys:
                yield Heads(first, step, len(members), first, step, len(members), offset, 1)


def _counts(offset: int, rate: int, segments: _Segments) -> tuple[int, int]:
    """Count the queries and the keys that an offset keeps of a segment."""
    queries, keys = (max(0, -(-(size - offset) // rate)) for size in (segments.queries, segments.keys))
    return queries, keys


def _calls(problem: Problem, branch: int, rate: int, segments: _Segments, heads: Heads) -> Iterator[Piece]:
    queries, keys = _counts(heads.offset, rate, segments)
    place = (branch, heads, segments.row, segments.start, segments.stack, segments.apart, rate)
    if not problem.causal or queries == keys:
        yield Piece(*place, 0, queries, keys, problem.causal)
        return
    # Cut where the keys end: a causal square, and queries after it that see every key. No kernel has to align T != S.
    yield Piece(*place, 0, keys, keys, True)
    yield Piece(*place, keys, queries - keys, keys, False)


class Task(NamedTuple):
    """One call of dilated attention, without its arrays; hashable."""

    problem: Problem
    scale: float
    detached: bool = False
    """True if mixing weights count as constants in the backward pass, as in torchscale."""
    kernel: str = "auto"
    """Name of the implementation whose partial form computes the pieces."""
    merge: str = "auto"
    """Method of merging partial results: "triton" (one fused kernel), "eager", or "auto"."""
    diagonal: bool = True
    """Whether heads of different offsets may share a call."""


def problem_of(workload: Workload) -> Problem:
    """Read a workload's mask, which `needs_dilated` accepts, as a problem."""
    parts = workload.visible_mask.split()
    pattern = next(part for part in parts if isinstance(part, Dilated))
    limits = [part.kv_lengths.array for part in parts if isinstance(part, Lengths)]
    lengths = tuple(int(min(row)) for row in zip(*limits)) if limits else None
    causal = any(isinstance(part, Causal) for part in parts)
    w = workload
    return Problem(pattern, w.batch, w.q_len, w.heads, w.kv_heads, causal, lengths)


def needs_dilated(workload: Workload) -> str | None:
    """Refuse every mask but one dilated mask, alone or with causal and lengths."""
    kinds = workload.visible_mask.kinds
    other = [kind for kind in kinds if kind not in ("dilated", "causal", "lengths")]
    if kinds.count("dilated") != 1:
        return "takes one dilated mask" + (f", not {kinds.count('dilated')}" if "dilated" in kinds else " and no other")
    return f"takes a dilated mask with causal and lengths, not with {other[0]}" if other else None
