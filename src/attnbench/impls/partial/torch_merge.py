"""Partial results become one: outputs weighted by their softmax denominators, LSEs added in log space.

Float32 (float64 for float64 inputs), in place; a row that no part has seen stays 0 with LSE -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NEGATIVE_INFINITY = float("-inf")


def nothing_yet(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of no parts, for inputs of that dtype: out [b, t, h, d] of zeros and lse [b, h, t] of -inf."""
    import torch

    batch, tokens, heads, _ = shape
    wide = torch.promote_types(dtype, torch.float32)
    lse = torch.full((batch, heads, tokens), NEGATIVE_INFINITY, dtype=wide, device=device)
    return torch.zeros(shape, dtype=wide, device=device), lse


def merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold a part into `out` [b, t, h, d] and `lse` [b, h, t], which may be views of some rows and heads of a whole."""
    import torch

    both = torch.logaddexp(lse, part_lse)
    # exp(-inf - (-inf)) would be NaN; a row unseen so far has both weights 0.
    base = both.masked_fill(both == NEGATIVE_INFINITY, 0.0)
    kept, added = (_per_row(torch.exp(one - base)) for one in (lse, part_lse))
    out.mul_(kept).addcmul_(part_out.to(out.dtype), added)
    lse.copy_(both)


def _per_row(weights: torch.Tensor) -> torch.Tensor:
    """[b, h, t] -> [b, t, h, 1], to scale outputs with."""
    return weights.transpose(1, 2).unsqueeze(-1)


def for_backward(lse: torch.Tensor) -> torch.Tensor:
    """LSE of the whole as a backward wants it: +inf where a row sees nothing, so that exp(s - lse) is 0 there."""
    return lse.masked_fill(lse == NEGATIVE_INFINITY, float("inf"))
