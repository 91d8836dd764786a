"""What torch has set for the whole process, and the functions of it that clocks and checks call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

from attnbench.frameworks.base import Setting, Watched

THREADS = "remove that call and pass --threads {0}, so that all are measured with as many"


def settings() -> Mapping[str, Setting]:
    """Return settings by name: threads, active modes and precision are refused, the others told."""
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    told: dict[str, Callable[[], Any]] = {
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
        "torch's active function modes": lambda: tuple(map(_name, _function_modes())),
        "torch's active dispatch modes": lambda: tuple(map(_name, _dispatch_modes())),
        "torch's autocast": _autocast,
    }
    found = {name: Setting(_read(read)) for name, read in told.items()}
    found |= {name: Setting(_read(read), refused=True) for name, read in refused.items()}
    found["torch's threads"] = Setting(torch.get_num_threads(), refused=True, remedy=THREADS)
    found["torch's threads between operators"] = Setting(torch.get_num_interop_threads(), refused=True)
    # A call that leaves it lower makes the yardstick of the checks less exact.
    precision = Setting(torch.get_float32_matmul_precision(), refused=True, set_again=True)
    found["torch's float32 matmul precision"] = precision
    return found


def functions() -> Sequence[tuple[str, Any, Watched]]:
    """Return torch's modules and classes; of its functional ones nothing here calls any, so changes are only told."""
    import torch

    library = Watched(harness=False)
    compiled = Watched(kinds=(BuiltinFunctionType,), harness=False)
    method = type(torch.Tensor.detach)
    tensor = Watched(kinds=(*library.kinds, method, property), harness=False)
    found: list[tuple[str, Any, Watched]] = [
        ("torch", torch, compiled),
        ("torch.Tensor", torch.Tensor, tensor),
        ("torch.nn.functional", torch.nn.functional, Watched(refused=False, harness=False)),
        ("torch.autograd", torch.autograd, library),
        ("torch.profiler", torch.profiler, library),
        ("torch.cuda", torch.cuda, library),
        ("torch.cuda.Event", torch.cuda.Event, tensor),
        ("torch.accelerator", torch.accelerator, library),
    ]
    return found


def refuse_modes() -> None:
    """Raise if a call has left a mode active: it could compute when its output is looked at, outside of the timing."""
    import torch

    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return
    modes = _function_modes() + _dispatch_modes()
    if modes:
        names = ", ".join(map(_name, modes))
        raise RuntimeError(f"the call left a mode of torch active ({names}): its time cannot be trusted")


def _function_modes() -> list[Any]:
    """List the active function modes, without that of torch.set_default_device: it only says where arrays are made."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]


def _dispatch_modes() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def _name(mode: Any) -> str:
    return type(mode).__name__


def _autocast() -> tuple[str, ...]:
    import torch

    return tuple(device for device in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(device))


def _read(read: Callable[[], Any]) -> Any:
    """Return the value, or that this build of torch does not have it."""
    try:
        return read()
    except (AttributeError, RuntimeError) as error:
        return f"not readable ({type(error).__name__})"
