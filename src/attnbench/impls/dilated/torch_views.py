"""A piece's tokens and heads as a strided view of [b, s, h, d]: nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.impls.dilated.pieces import Piece
from attnbench.impls.parts.torch_merge import nothing_yet

if TYPE_CHECKING:
    import torch


def folds(*arrays: torch.Tensor) -> bool:
    """Whether batch rows follow each other in memory, so that segments of several rows are one stack.

    Asked of every array that is viewed: one that torch calls contiguous may still have any stride on an axis of 1.
    """
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in arrays)


def readable(x: torch.Tensor) -> torch.Tensor:
    """The array itself, or a copy where a kernel could not read it: dim must be the innermost axis, none expanded."""
    dense = x.stride(-1) == 1 and all(step > 0 for size, step in zip(x.shape, x.stride()) if size > 1)
    return x if dense else x.contiguous()


def nothing_merged(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, s, h, d], lse [b, s, h]) of no pieces yet, in the precision that merging takes."""
    out, lse = nothing_yet((*q.shape[:3], v.shape[-1]), q.dtype, q.device)
    return out, lse.view(q.shape[:3])


def query_view(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[stack, queries, heads, d] of q, out, dout or dq."""
    heads = piece.heads
    begin = piece.start + heads.offset + piece.skip * piece.rate
    return _view(x, piece, begin, piece.queries, heads.first, heads.step, heads.number)


def key_view(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[stack, keys, kv_heads, d] of k, v, dk or dv."""
    heads = piece.heads
    return _view(x, piece, piece.start + heads.offset, piece.keys, heads.kv_first, heads.kv_step, heads.kv_number)


def row_view(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[stack, heads, queries] of one number a row, kept as [b, s, h] so that it stacks as the arrays do."""
    return query_view(x.unsqueeze(-1), piece).squeeze(-1).transpose(1, 2)


def _view(x: torch.Tensor, piece: Piece, begin: int, tokens: int, first: int, step: int, heads: int) -> torch.Tensor:
    row, token, head, _ = x.stride()
    size = (piece.stack, tokens, heads, x.shape[-1])
    stride = (piece.apart * token, piece.rate * token, step * head + piece.heads.shift * token, 1)
    return x.as_strided(size, stride, x.storage_offset() + piece.row * row + begin * token + first * head)
