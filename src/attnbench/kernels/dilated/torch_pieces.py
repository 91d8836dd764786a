"""A piece on torch arrays: its tokens and heads as strided views of [b, s, h, d], and the dense kernel for it.

Nothing is copied. Kernels are chosen once for each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from attnbench import masks
from attnbench.impls.partial.torch_choice import Rules, choose, current
from attnbench.impls.partial.torch_passes import nothing_yet
from attnbench.kernels.dilated.pieces import Piece
from attnbench.spec import Partial, Workload

if TYPE_CHECKING:
    import torch


class View(NamedTuple):
    """Arguments of `as_strided`, heads first; the offset counts from the array's own first number."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the view [stack, heads, tokens, d] of an array with the strides that the view was made for."""
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)

    def tokens_first(self) -> View:
        """Return the same view as [stack, tokens, heads, d]."""
        (a, b, c, d), (e, f, g, h) = self.size, self.stride
        return View((a, c, b, d), (e, g, f, h), self.offset)

    def without_dim(self) -> View:
        """Return the view as [stack, heads, tokens], for an array of one number for each row."""
        return View(self.size[:-1], self.stride[:-1], self.offset)


def query_view(piece: Piece, strides: Sequence[int], dim: int) -> View:
    """Return the view of the piece's rows of q, out, dout or dq."""
    heads = piece.heads
    begin = piece.start + heads.offset + piece.skip * piece.rate
    return _view(piece, strides, dim, begin, piece.queries, heads.first, heads.step, heads.number)


def key_view(piece: Piece, strides: Sequence[int], dim: int) -> View:
    """Return the view of the piece's rows of k, v, dk or dv."""
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
    """Return the piece's [stack, queries, heads, d] of q, out, dout or dq."""
    return query_view(piece, x.stride(), x.shape[-1]).tokens_first().of(x)


def keys_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the piece's [stack, keys, kv_heads, d] of k, v, dk or dv."""
    return key_view(piece, x.stride(), x.shape[-1]).tokens_first().of(x)


def rows_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
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


def nothing_merged(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [b, s, h, d], lse [b, s, h]) before any piece is merged, in the precision that merging takes."""
    out, lse = nothing_yet((*q.shape[:3], v.shape[-1]), q.dtype, q.device)
    return out, lse.view(q.shape[:3])


class Sizes(NamedTuple):
    """Sizes of one dense call."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


def partial_of(
    kernel: str, dtype: torch.dtype, device: torch.device, sizes: Sizes, causal: bool, scale: float
) -> Partial:
    """Return (forward, backward), bshd, for pieces of these sizes; `kernel` is an implementation's name or "auto"."""
    import torch

    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    return _partial(kernel, kind, str(dtype).removeprefix("torch."), sizes, causal, scale, current())


@lru_cache(maxsize=4096)
def _partial(kernel: str, device: str, dtype: str, sizes: Sizes, causal: bool, scale: float, rules: Rules) -> Partial:
    mask = masks.causal() if causal else masks.full()
    workload = Workload(**sizes._asdict(), dtype=dtype, mask=mask, scale=scale, pass_="train")
    return choose(kernel, workload, device, rules)[1]
