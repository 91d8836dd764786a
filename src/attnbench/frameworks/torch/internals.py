"""torch's private APIs and the state of its process: settings, active modes, autocast, streams.

Both passes of attention take their inputs in autocast's dtype, as torch's own do, and compute with autocast off: if the
forward pass ran in 16 bits and the backward pass in 32, or the reverse, the result would not be a gradient.

Tensors that are made once and read on any CUDA stream are finished before anyone else can find them, so no stream reads
what another still writes; and the allocator knows every stream that reads them, so their memory is not reused while one
of those has work left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from attnbench.frameworks.base import Setting, Watched

if TYPE_CHECKING:
    import torch

THREADS = "remove that call and pass --threads {0}, so that every implementation is measured with the same number"


def settings() -> Mapping[str, Setting]:
    """Return settings by name: changes of threads, active modes and precision are refused, others are recorded."""
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    recorded: dict[str, Callable[[], Any]] = {
        "torch's default dtype": torch.get_default_dtype,
        "torch's default device": lambda: str(torch.get_default_device()),
        "torch's gradient mode": torch.is_grad_enabled,
        "torch's inference mode": torch.is_inference_mode_enabled,
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "torch's flash SDPA switch": cuda.flash_sdp_enabled,
        "torch's memory-efficient SDPA switch": cuda.mem_efficient_sdp_enabled,
        "torch's math SDPA switch": cuda.math_sdp_enabled,
        "torch's cuDNN SDPA switch": cuda.cudnn_sdp_enabled,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.enabled": lambda: cudnn.enabled,
        "torch's mkldnn switch": lambda: torch.backends.mkldnn.enabled,  # pyright: ignore[reportAttributeAccessIssue]
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "torch's reduced-precision sums": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
    }
    refused: dict[str, Callable[[], Any]] = {
        "torch's active function modes": lambda: tuple(_function_modes()),
        "torch's active dispatch modes": lambda: tuple(_dispatch_modes()),
        "torch's autocast": lambda: tuple(filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))),
    }
    values = {name: Setting(_read(read)) for name, read in recorded.items()}
    values |= {name: Setting(_read(read), refused=True) for name, read in refused.items()}
    values["torch's threads"] = Setting(torch.get_num_threads(), refused=True, remedy=THREADS)
    values["torch's threads between operators"] = Setting(torch.get_num_interop_threads(), refused=True)
    # A call that leaves it lower makes the reference of the checks less exact.
    precision = Setting(torch.get_float32_matmul_precision(), refused=True, set_again=True)
    return values | {"torch's float32 matmul precision": precision}


def functions() -> Sequence[tuple[str, Any, Watched]]:
    """Return torch's modules and classes to watch; changes of torch.nn.functional, unused here, are only recorded."""
    import torch

    library = Watched(harness=False)
    compiled = Watched(kinds=(BuiltinFunctionType,), harness=False)
    tensor = Watched(kinds=(*library.kinds, type(torch.Tensor.detach), property), harness=False)
    return [
        ("torch", torch, compiled),
        ("torch.Tensor", torch.Tensor, tensor),
        ("torch.nn.functional", torch.nn.functional, Watched(refused=False, harness=False)),
        ("torch.autograd", torch.autograd, library),
        ("torch.profiler", torch.profiler, library),
        ("torch.cuda", torch.cuda, library),
        ("torch.cuda.Event", torch.cuda.Event, tensor),
        ("torch.accelerator", torch.accelerator, library),
    ]


def refuse_modes() -> None:
    """Raise if a call has left a mode active: it could compute when its output is looked at, outside of the timing."""
    import torch

    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return
    if modes := _function_modes() + _dispatch_modes():
        raise RuntimeError(f"the call left a mode of torch active ({', '.join(modes)}): its time cannot be trusted")


def outside_modes() -> AbstractContextManager[object]:
    """Return a context in which new tensors have numbers and are not part of a traced graph, unless they are fake.

    make_fx traces real tensors by a mode, under which a mask that is kept would be a tensor of that graph.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _python_dispatch as modes

    stack = modes._get_current_dispatch_mode_stack()
    plain = not stack or any(isinstance(mode, FakeTensorMode) for mode in stack)
    return nullcontext() if plain else modes._disable_current_modes()


def _function_modes() -> list[str]:
    """List the active function modes, without that of torch.set_default_device: it only says where arrays are made."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return [type(mode).__name__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]


def _dispatch_modes() -> list[str]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def _read(read: Callable[[], Any]) -> Any:
    """Return the value of a setting, or a note that this build of torch does not have it."""
    try:
        return read()
    except (AttributeError, RuntimeError) as error:
        return f"not readable ({type(error).__name__})"


_UNCHANGED = nullcontext()


def is_autocast(kind: str) -> bool:
    """Return whether autocast is on for a kind of device; never for meta tensors, which torch does not know there."""
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
    """Return a context in which autocast is off on that kind of device; afterwards it is restored."""
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


def share(made: Any, device: torch.device) -> Shared | None:
    """Return tensors just made on a device's current stream, finished; None if no tensor is seen in `made`."""
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
        """Register the current stream as a reader; call this before it reads."""
        stream = stream_of(self._device)
        if stream not in self._streams:
            import torch

            current = torch.cuda.current_stream(self._device)
            for tensor in self._tensors:
                tensor.record_stream(current)
            self._streams.add(stream)


def stream_of(device: torch.device) -> int:
    """Return the handle of a CUDA device's current stream."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)  # pyright: ignore[reportAttributeAccessIssue]


def finish(device: torch.device) -> None:
    """Wait for the current stream, unless it is being captured: then nothing runs yet, and waiting is an error."""
    import torch

    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def tensors_of(made: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tensor, tuples, or FlexAttention's table of blocks; none of torch's causal biases."""
    import torch

    parts = made.as_tuple() if hasattr(made, "as_tuple") else made
    if type(parts) is torch.Tensor:
        yield parts
    elif isinstance(parts, tuple | list):
        for part in parts:
            yield from tensors_of(part)
