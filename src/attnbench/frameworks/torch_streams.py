"""Tensors that are made once and read by calls on any CUDA stream.

They are finished before anyone else can find them, so no stream reads what another still writes; and the allocator is
told of every stream that reads them, so their memory is not given away while one of those has work left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def share(made: Any, device: torch.device) -> Shared | None:
    """What was just made on the current stream of a device, finished; None where no tensor can be seen in it."""
    if device.type != "cuda":
        return None
    tensors = tuple(tensors_of(made))
    if tensors or callable(made):
        finish(device)
    return Shared(tensors, device) if tensors else None


class Shared:
    """Tensors of one stream that others read too."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._streams = {stream_of(device)}

    def read_here(self) -> None:
        """To be called before the current stream reads it."""
        stream = stream_of(self._device)
        if stream not in self._streams:
            import torch

            current = torch.cuda.current_stream(self._device)
            for tensor in self._tensors:
                tensor.record_stream(current)
            self._streams.add(stream)


def stream_of(device: torch.device) -> int:
    """The current stream of a CUDA device, by its handle."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)  # pyright: ignore[reportAttributeAccessIssue]


def finish(device: torch.device) -> None:
    """Wait for the current stream, unless it is being captured: then nothing runs yet, and waiting is an error."""
    import torch

    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def tensors_of(made: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, in tuples of them, or in FlexAttention's table of blocks; not torch's causal biases."""
    import torch

    parts = made.as_tuple() if hasattr(made, "as_tuple") else made
    if type(parts) is torch.Tensor:
        yield parts
    elif isinstance(parts, tuple | list):
        for part in parts:
            yield from tensors_of(part)
