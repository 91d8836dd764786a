"""What torch's profiler and allocators say about one call: operators and kernels that ran, peak memory, a trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.frameworks.base import Inputs, Peak, Program, unseen
from attnbench.frameworks.torch_programs import owned

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

RUN = "attnbench::run"
TAKEN = "allocated_bytes.all.allocated"
"""All bytes that the caching allocator has ever handed out, in `memory_stats`."""
BOOKKEEPING = re.compile(
    r"^aten::(empty\w*|resize\w*|set_|as_strided|view\w*|_unsafe_view|reshape|_reshape_alias|transpose|t|permute|expand\w*"
    r"|slice|select|narrow|split\w*|chunk|unsqueeze|squeeze|unflatten|flatten|alias|detach\w*|result_type|to|item"
    r"|_local_scalar_dense|lift_fresh|is_nonzero|scalar_tensor|ones_like|zeros_like|contiguous|clone|resolve_\w+"
    r"|matmul|softmax|einsum|scaled_dot_product_attention|_fused_sdp_choice\w*)$"
)
"""Views, allocations, and wrappers whose work is done by an operator that is listed itself."""
COMPILED = re.compile(
    r"^(?:## Call )?(Torch-Compiled Region|CompiledFxGraph|CompiledFunctionBackward|CompiledFunction)"
)
FUSED = re.compile(r"(^|_)(cpp_fused|triton_)")
SDPA = re.compile(r"^aten::_(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)")


def synchronize(device: str) -> None:
    """Wait for everything queued on the device; nothing to do on a CPU."""
    import torch

    if device != "cpu":
        torch.get_device_module(device).synchronize()


@contextmanager
def recorded(device: str, host: bool = True, **options: Any) -> Iterator[profile]:
    """Record the kernels of a device meanwhile, and if `host`, the operators that the host ran.

    `torch.profiler.profile` wraps the same recorder and imports torch.compile first, which takes each process over a
    second.
    """
    from torch.autograd.profiler import profile

    profiler = profile(use_kineto=True, use_cpu=host, use_device=None if device == "cpu" else device, **options)
    with profiler:
        yield profiler


def _profiled(program: Program, inputs: Inputs, device: str, **options: Any) -> profile:
    """Return the profile of one `run`; a call before it has compiled and filled the caches."""
    program.run(program.prepare(inputs))
    state = program.prepare(inputs)
    synchronize(device)
    with recorded(device, **options) as profiler:
        output = program.run(state)
        synchronize(device)
    del output
    return profiler


def raw_events(profiler: profile) -> list[Any]:
    """The profiler's events in order of time (the summary it makes of them has lost memory and device order)."""
    assert profiler.kineto_results is not None
    return sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())


def is_device_work(event: Any) -> bool:
    """A kernel, copy or fill that ran on an accelerator, not a host event or an annotation drawn over kernels."""
    return event.device_type().name != "CPU" and not event.is_user_annotation() and event.name() != "[memory]"


def kernel_names(program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
    """Operators of a CPU call; on an accelerator the SDPA operators, marks of compiled graphs, and kernels."""
    if device not in ("cpu", "cuda", "xpu"):
        return None, f"torch's profiler does not see kernels on {device}"
    host: list[str] = []
    kernels: list[str] = []
    for event in raw_events(_profiled(program, inputs, device)):
        if is_device_work(event):
            kernels.append(event.name())
        elif (name := _operator(event.name())) is not None:
            host.append(name)
    if device != "cpu":
        if not kernels:
            return None, "the profiler saw no kernels: CUPTI (or its counterpart) is not available here"
        host = [name for name in host if SDPA.search(name) or not name.startswith("aten::")]
    return list(dict.fromkeys(host + kernels)), None


def _operator(name: str) -> str | None:
    """The name to list for a host event, without numbers that change from run to run; None for noise."""
    if name.startswith("aten::"):
        return None if BOOKKEEPING.match(name) else name
    if compiled := COMPILED.match(name):
        return compiled[1]
    return name if FUSED.search(name) else None


def write_trace(program: Program, inputs: Inputs, path: Path, device: str) -> Path:
    """One call as a Chrome/Perfetto trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _profiled(program, inputs, device, record_shapes=True).export_chrome_trace(str(path))
    return path


def cpu_peak(program: Program, inputs: Inputs) -> Peak:
    """Running sum of the allocator's events inside `run`; preparation is profiled too, so that its frees are seen."""
    from torch.profiler import record_function

    program.run(program.prepare(inputs))
    with recorded("cpu", profile_memory=True) as profiler:
        state = program.prepare(inputs)
        with record_function(RUN):
            output = program.run(state)
    made = _new_bytes(output, inputs)
    del output
    events = raw_events(profiler)
    start = next(event.start_ns() for event in events if event.name() == RUN)
    held = peak = taken = 0
    for event in events:
        if event.name() != "[memory]":
            continue
        if event.start_ns() >= start:
            taken += max(0, event.nbytes())
            held += event.nbytes()
            peak = max(peak, held)
    return unseen("torch") if taken < made else Peak(peak, method="torch profiler, running sum of CPU allocations")


def _new_bytes(output: Any, inputs: Any) -> int:
    """Bytes of the outputs that lie in no input's memory; a view counts as much of its memory as it can show."""
    given = {array.untyped_storage().data_ptr() for array in _tensors(inputs)}
    made: dict[int, int] = {}
    for array in _tensors(output):
        storage = array.untyped_storage()
        if storage.data_ptr() not in given:
            shown = made.get(storage.data_ptr(), 0) + array.nbytes
            made[storage.data_ptr()] = min(storage.nbytes(), shown)
    return sum(made.values())


def _tensors(tree: Any) -> Iterator[Any]:
    """Plain tensors in containers and modules."""
    import torch

    if isinstance(tree, torch.nn.Module):
        yield from (*tree.parameters(), *tree.buffers())
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)
    elif owned(tree):
        yield tree


def accelerator_peak(program: Program, inputs: Inputs, device: str) -> Peak:
    """The caching allocator's own high-water marks around `run`."""
    import torch

    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return Peak(None, f"torch keeps no peak statistics on {device}")
    program.run(program.prepare(inputs))
    module.synchronize()
    module.empty_cache()
    earlier = module.memory_stats().get(TAKEN)
    state = program.prepare(inputs)
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    output = program.run(state)
    module.synchronize()
    allocated, reserved = module.max_memory_allocated(), module.max_memory_reserved()
    taken, made = module.memory_stats().get(TAKEN), _new_bytes(output, inputs)
    del output
    if earlier is not None and taken is not None and taken - earlier < made:
        return unseen("torch")
    fragmentation = 1 - allocated / reserved if reserved else None
    return Peak(allocated - before, None, reserved, fragmentation, f"torch {device} caching allocator")
