"""A dilated pattern as dense calls: which tokens and heads of [b, s, h, d] each call reads, as one strided view.

Pure arithmetic on sizes and strides; views copy nothing, and this module imports no framework. Head h of a branch of
rate r keeps tokens offset(h), offset(h) + r, ... of each segment:

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
from typing import TYPE_CHECKING, NamedTuple

from attnbench.masks import Causal, Dilated, Lengths
from attnbench.spec import Workload

if TYPE_CHECKING:
    import torch


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

    def line(self, keys: bool) -> tuple[int, int, int]:
        """Return (first, step, number) of the query heads, or of the key/value heads."""
        return (self.kv_first, self.kv_step, self.kv_number) if keys else (self.first, self.step, self.number)


class DilatedPiece(NamedTuple):
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


class DilatedProblem(NamedTuple):
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
def pieces(problem: DilatedProblem, fold: bool = True, diagonal: bool = True) -> tuple[DilatedPiece, ...]:
    """Return the dense calls, branch by branch; together they hold every pair exactly as often as the pattern does.

    `fold`: batch rows follow each other in memory as segments do. `diagonal`: heads of several offsets share calls.
    """
    calls: list[DilatedPiece] = []
    for branch, (width, rate) in enumerate(zip(problem.pattern.segment_lengths, problem.pattern.dilation_rates)):
        for segments in _segments(problem, width, fold):
            for heads in _head_sets(problem, rate, segments, diagonal):
                queries, keys = _counts(heads.offset, rate, segments)
                place = (branch, heads, segments.row, segments.start, segments.stack, segments.apart, rate)
                if not problem.causal or queries == keys:
                    calls.append(DilatedPiece(*place, 0, queries, keys, problem.causal))
                else:  # cut where the keys end: a causal square, and queries after it that see every key
                    calls.append(DilatedPiece(*place, 0, keys, keys, True))
                    calls.append(DilatedPiece(*place, keys, queries - keys, keys, False))
    return tuple(calls)


def computed_pairs(problem: DilatedProblem) -> int:
    """Count the pairs that the pieces compute, over all batch rows and heads: a pair in two branches counts twice."""
    total = 0
    for piece in pieces(problem):
        square = piece.queries * (piece.queries + 1) // 2
        total += piece.stack * piece.heads.number * (square if piece.causal else piece.queries * piece.keys)
    return total


def _segments(problem: DilatedProblem, width: int, fold: bool) -> Iterator[_Segments]:
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


def _head_sets(problem: DilatedProblem, rate: int, segments: _Segments, diagonal: bool) -> list[Heads]:
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


class Task(NamedTuple):
    """One call of dilated attention, without its arrays; hashable."""

    problem: DilatedProblem
    scale: float
    detached: bool = False
    """True if mixing weights count as constants in the backward pass, as in torchscale."""
    kernel: str = "auto"
    """Name of the implementation whose partial form computes the pieces."""
    merge: str = "auto"
    """Method of merging partial results: "triton" (one fused kernel), "eager", or "auto"."""
    diagonal: bool = True
    """Whether heads of different offsets may share a call."""


def problem_of(workload: Workload) -> DilatedProblem:
    """Read a workload's mask, which `needs_dilated` accepts, as a problem."""
    parts = workload.visible_mask.split()
    pattern = next(part for part in parts if isinstance(part, Dilated))
    limits = [part.kv_lengths.array for part in parts if isinstance(part, Lengths)]
    lengths = tuple(int(min(row)) for row in zip(*limits)) if limits else None
    causal = any(isinstance(part, Causal) for part in parts)
    w = workload
    return DilatedProblem(pattern, w.batch, w.q_len, w.heads, w.kv_heads, causal, lengths)


def needs_dilated(workload: Workload) -> str | None:
    """Refuse every mask but one dilated mask, alone or with causal and lengths."""
    kinds = workload.visible_mask.kinds
    other = [kind for kind in kinds if kind not in ("dilated", "causal", "lengths")]
    if kinds.count("dilated") != 1:
        return "takes one dilated mask" + (f", not {kinds.count('dilated')}" if "dilated" in kinds else "")
    return f"combines a dilated mask only with causal and lengths, not with {other[0]}" if other else None


class StridedView(NamedTuple):
    """Arguments of `as_strided`, heads first; the offset counts from the array's own first number."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the view [stack, heads, tokens, d] of an array with the strides that the view was made for."""
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)

    def tokens_first(self) -> StridedView:
        """Return the same view as [stack, tokens, heads, d]."""
        (a, b, c, d), (e, f, g, h) = self.size, self.stride
        return StridedView((a, c, b, d), (e, g, f, h), self.offset)

    def without_dim(self) -> StridedView:
        """Return the view as [stack, heads, tokens], for an array of one number for each row."""
        return StridedView(self.size[:-1], self.stride[:-1], self.offset)


def query_view(piece: DilatedPiece, strides: Sequence[int], dim: int) -> StridedView:
    """Return the view of the piece's rows of q, out, dout or dq."""
    return _view(piece, strides, dim, piece.skip, piece.queries, keys=False)


def key_view(piece: DilatedPiece, strides: Sequence[int], dim: int) -> StridedView:
    """Return the view of the piece's rows of k, v, dk or dv."""
    return _view(piece, strides, dim, 0, piece.keys, keys=True)


def _view(piece: DilatedPiece, strides: Sequence[int], dim: int, skip: int, tokens: int, keys: bool) -> StridedView:
    (row, token, head, _), (first, step, number) = strides, piece.heads.line(keys)
    begin = piece.start + piece.heads.offset + skip * piece.rate
    size = (piece.stack, number, tokens, dim)
    stride = (piece.apart * token, step * head + piece.heads.shift * token, piece.rate * token, 1)
    return StridedView(size, stride, piece.row * row + begin * token + first * head)


def queries_of(x: torch.Tensor, piece: DilatedPiece) -> torch.Tensor:
    """Return the piece's [stack, queries, heads, d] of q, out, dout or dq."""
    return query_view(piece, x.stride(), x.shape[-1]).tokens_first().of(x)


def keys_of(x: torch.Tensor, piece: DilatedPiece) -> torch.Tensor:
    """Return the piece's [stack, keys, kv_heads, d] of k, v, dk or dv."""
    return key_view(piece, x.stride(), x.shape[-1]).tokens_first().of(x)


def rows_of(x: torch.Tensor, piece: DilatedPiece) -> torch.Tensor:
    """Return the piece's [stack, heads, queries] of [b, s, h], one number for each row."""
    return query_view(piece, (*x.stride(), 1), 1).without_dim().of(x)


def folds(*arrays: torch.Tensor) -> bool:
    """Return whether batch rows of all arrays follow each other in memory, so that segments of several rows stack.

    Every array counts: an array that torch calls contiguous may still have any stride on an axis of 1.
    """
    return all(fold(x.shape, x.stride()) for x in arrays)


def fold(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether batch rows of an array of this shape and these strides follow each other in memory."""
    return shape[0] == 1 or stride[0] == shape[1] * stride[1]


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives to a new array."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return the array, or a copy if no kernel could read it: dim must be the innermost axis, and no axis expanded."""
    if x.is_contiguous():
        return x
    dense = x.stride(-1) == 1 and all(step > 0 for size, step in zip(x.shape, x.stride()) if size > 1)
    return x if dense else x.contiguous()
