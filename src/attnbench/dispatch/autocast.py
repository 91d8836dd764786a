"""torch's autocast: attention takes its inputs in autocast's dtype, as torch's own does, and computes with it off.

A call whose forward ran in 16 bits and whose backward, outside the block, in 32 would not be the gradient of anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def under_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch's function takes them: in autocast's dtype where autocast is on, float64 excepted."""
    import torch

    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
