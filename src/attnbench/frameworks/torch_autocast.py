"""torch's autocast: attention takes its inputs in autocast's dtype, as torch's own does, and computes with it off.

Both passes do: a call whose forward ran in 16 bits and whose backward in 32, or the other way round, would not have the
gradient of anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_UNCHANGED = nullcontext()


def is_autocast(kind: str) -> bool:
    """Whether autocast is on for that kind of device; torch knows none of meta tensors."""
    import torch

    return kind != "meta" and torch.is_autocast_enabled(kind)


def under_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors as torch's own function takes them: in autocast's dtype if it is on, float64 excepted."""
    kind = tensors[0].device.type
    return tuple([x.to(dtype_under_autocast(x, kind)) for x in tensors]) if is_autocast(kind) else tensors


def dtype_under_autocast(tensor: torch.Tensor, kind: str) -> torch.dtype:
    """Return the dtype in which attention takes a tensor on that kind of device."""
    import torch

    changes = is_autocast(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if changes else tensor.dtype


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off on that kind of device, and afterwards as it was."""
    import torch

    if kind != "meta" and torch.compiler.is_dynamo_compiling():
        return torch.autocast(kind, enabled=False)  # it costs more, and torch.compile can follow it
    return _Off(kind) if is_autocast(kind) else _UNCHANGED


def without_autocast_for(arrays: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off on the device of the first tensor; others may be None."""
    import torch

    if not torch._C._is_any_autocast_enabled():
        return _UNCHANGED
    kind = next((x.device.type for x in arrays if isinstance(x, torch.Tensor)), None)
    return _UNCHANGED if kind is None else without_autocast(kind)


class _Off(AbstractContextManager[None]):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        import torch

        torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_autocast_enabled(self._kind, True)
