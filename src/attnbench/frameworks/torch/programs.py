"""Programs of the passes of a torch call, and what the profiler and the allocators report about them.

A call `(q, k, v) -> out` becomes the forward pass without a graph, the backward pass alone, or both. The profiler and
the allocators give operators and kernels, peak memory, or a trace of one run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from attnbench.frameworks.base import Inputs, Peak, Program, Programs, unseen
from attnbench.spec import Array, Call, Pass


@dataclass(frozen=True)
class ReplayableProgram(Program):
    """A Program whose `run` frees what it reads (a graph's saved tensors); `rerun` keeps it, for CUDA-graph capture."""

    rerun: Callable[[Any], tuple[Array, ...]] | None = None


def owned(value: Any) -> bool:
    """Return whether a value is a plain, concrete tensor: no subclass (fake, lazy, functional), no meta device."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"


def make_programs(call: Call, pass_: Pass, example: Inputs) -> Programs:
    """Return the programs of a pass; `compile_ns` is the time of the first calls if the call compiles, else 0."""

    def output(q: Array, k: Array, v: Array) -> Array:
        out = call(q, k, v)
        if not owned(out):
            raise TypeError(_not_owned(out))
        return out

    def train(state: tuple[tuple[Array, ...], Array]) -> tuple[Array, ...]:
        leaves, dout = state
        out = output(*leaves)
        return (out, *_gradients(out, leaves, dout))

    forward = Program(run=lambda state: (output(*state),), prepare=_leaves)
    backward = ReplayableProgram(
        run=lambda state: _gradients(*state),
        # dO is made last, so that no work on it can be done in the forward pass, which is not timed.
        prepare=lambda inputs: (output(*(leaves := _leaves(inputs))), leaves, inputs.cotangent()),
        rerun=lambda state: _gradients(*state, keep=True),
    )
    if pass_ == "forward":
        main, parts = Program(run=torch.no_grad()(lambda inputs: (output(*inputs[:3]),))), {}
    elif pass_ == "backward":
        main, parts = backward, {}
    else:
        main = Program(run=train, prepare=lambda inputs: (_leaves(inputs), inputs.cotangent()))
        parts = {"forward": forward, "backward": backward}
    compile_ns = 0
    if getattr(call, "compiles", False):
        start = perf_counter_ns()
        for program in (main, *parts.values()):
            program.run(program.prepare(example))
        compile_ns = perf_counter_ns() - start
    return Programs(main, compile_ns, parts)


def _not_owned(out: Any) -> str:
    if not isinstance(out, torch.Tensor):
        return f"the call returned {type(out).__name__}, not a torch.Tensor: return only the output."
    if out.device.type == "meta":
        return "the call returned a tensor of the meta device, which holds no values: return the computed output."
    return f"the call returned {type(out).__name__}, not a plain torch.Tensor: return one that holds its values itself."


def _leaves(inputs: Inputs) -> tuple[Array, Array, Array]:
    q, k, v = (array.detach().requires_grad_() for array in (inputs.q, inputs.k, inputs.v))
    return q, k, v


def _gradients(out: Array, leaves: tuple[Array, ...], dout: Array, keep: bool = False) -> tuple[Array, ...]:
    return torch.autograd.grad(out, leaves, dout, retain_graph=keep)


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
    """Wait for everything queued on the device; return at once for a CPU."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


@contextmanager
def recorded(device: str, host: bool = True, **options: Any) -> Iterator[profile]:
    """Record the kernels of a device while the block runs and, if `host`, the operators that the host ran.

    `torch.profiler.profile` wraps the same recorder and imports torch.compile first, which takes each process over a
    second.
    """
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
    """Return the profiler's events in order of time (its own summary has lost memory and device order)."""
    assert profiler.kineto_results is not None
    return sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())


def is_device_work(event: Any) -> bool:
    """Return whether an event is a kernel, copy or fill on an accelerator, not a host event or an annotation."""
    return event.device_type().name != "CPU" and not event.is_user_annotation() and event.name() != "[memory]"


def kernel_names(program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
    """Return the operators of a CPU call; on an accelerator its SDPA operators, compiled graphs and kernels."""
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
    """Return the name to list for a host event, without numbers that change from run to run; None for noise."""
    if name.startswith("aten::"):
        return None if BOOKKEEPING.match(name) else name
    if compiled := COMPILED.match(name):
        return compiled[1]
    return name if FUSED.search(name) else None


def write_trace(program: Program, inputs: Inputs, path: Path, device: str) -> Path:
    """Write one call as a Chrome/Perfetto trace and return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _profiled(program, inputs, device, record_shapes=True).export_chrome_trace(str(path))
    return path


def cpu_peak(program: Program, inputs: Inputs) -> Peak:
    """Return the peak of the running sum of the allocator's events inside `run`.

    Preparation is profiled too, so that its frees are seen.
    """
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
    """Return the bytes of the outputs outside the memory of the inputs; a view counts only the part that it shows."""
    given = {array.untyped_storage().data_ptr() for array in _tensors(inputs)}
    made: dict[int, int] = {}
    for array in _tensors(output):
        storage = array.untyped_storage()
        if storage.data_ptr() not in given:
            shown = made.get(storage.data_ptr(), 0) + array.nbytes
            made[storage.data_ptr()] = min(storage.nbytes(), shown)
    return sum(made.values())


def _tensors(tree: Any) -> Iterator[Any]:
    """Yield the plain tensors in containers and modules."""
    if isinstance(tree, torch.nn.Module):
        yield from (*tree.parameters(), *tree.buffers())
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)
    elif owned(tree):
        yield tree


def accelerator_peak(program: Program, inputs: Inputs, device: str) -> Peak:
    """Return the caching allocator's own high-water marks around `run`."""
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
