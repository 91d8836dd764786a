"""torch's autocast: attention takes its inputs in autocast's dtype, as torch's own does, and computes with it off.

A call whose forward ran in 16 bits and whose backward, outside the block, in 32 would not be the gradient of anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

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


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Off inside; torch's own context, which costs more, only where torch.compile must follow it."""
    import torch

    return torch.autocast(kind, enabled=False) if torch.compiler.is_dynamo_compiling() else _Off(kind)


class _Off(AbstractContextManager[None]):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        import torch

        torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_autocast_enabled(self._kind, True)
