"""A piece's tokens and heads as a strided view of [b, s, h, d]: nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from attnbench.impls.partial.torch_passes import nothing_yet
from attnbench.kernels.dilated.pieces import Piece

if TYPE_CHECKING:
    import torch


class View(NamedTuple):
    """What `as_strided` is told, heads first; the offset counts from the array's own first number."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """[stack, heads, tokens, d] of an array with the strides that the view was made for."""
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)

    def tokens_first(self) -> View:
        """[stack, tokens, heads, d]."""
        (a, b, c, d), (e, f, g, h) = self.size, self.stride
        return View((a, c, b, d), (e, g, f, h), self.offset)

    def without_dim(self) -> View:
        """[stack, heads, tokens], of an array of one number a row."""
        return View(self.size[:-1], self.stride[:-1], self.offset)


def query_view(piece: Piece, strides: Sequence[int], dim: int) -> View:
    """The rows of q, out, dout or dq."""
    heads = piece.heads
    begin = piece.start + heads.offset + piece.skip * piece.rate
    return _view(piece, strides, dim, begin, piece.queries, heads.first, heads.step, heads.number)


def key_view(piece: Piece, strides: Sequence[int], dim: int) -> View:
    """The rows of k, v, dk or dv."""
    heads = piece.heads
    begin = piece.start + heads.offset
    return _view(piece, strides, dim, begin, piece.keys, heads.kv_first, heads.kv_step, heads.kv_number)


def _view(
    piece: Piece, strides: Sequence[int], dim: int, begin: int, tokens: int, first: int, step: int, heads: int
) -> View:
    row, token, head, _ = strides
    size = (piece.stack, heads, tokens, dim)
    stride = (piece.apart * token, step * head + piece.heads.shift * token, piece.rate * token, 1)
    return View(size, stride, piece.row * row + begin * token + first * head)


def queries_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[stack, queries, heads, d] of q, out, dout or dq."""
    return query_view(piece, x.stride(), x.shape[-1]).tokens_first().of(x)


def keys_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[stack, keys, kv_heads, d] of k, v, dk or dv."""
    return key_view(piece, x.stride(), x.shape[-1]).tokens_first().of(x)


def rows_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[stack, heads, queries] of one number a row, kept as [b, s, h] so that it stacks as the arrays do."""
    return query_view(piece, (*x.stride(), 1), 1).without_dim().of(x)


def folds(*arrays: torch.Tensor) -> bool:
    """Whether batch rows follow each other in memory, so that segments of several rows are one stack.

    Asked of every array that is viewed: one that torch calls contiguous may still have any stride on an axis of 1.
    """
    return all(fold(x.shape, x.stride()) for x in arrays)


def fold(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """The same of one array, by its shape and strides."""
    return shape[0] == 1 or stride[0] == shape[1] * stride[1]


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """As torch gives them to a new array."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def readable(x: torch.Tensor) -> torch.Tensor:
    """The array itself, or a copy where a kernel could not read it: dim must be the innermost axis, none expanded."""
    if x.is_contiguous():
        return x
    dense = x.stride(-1) == 1 and all(step > 0 for size, step in zip(x.shape, x.stride()) if size > 1)
    return x if dense else x.contiguous()


def nothing_merged(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, s, h, d], lse [b, s, h]) of no pieces yet, in the precision that merging takes."""
    out, lse = nothing_yet((*q.shape[:3], v.shape[-1]), q.dtype, q.device)
    return out, lse.view(q.shape[:3])
