"""PyTorch behind the Framework interface, on CPU, CUDA, ROCm, XPU and MPS. ROCm, XPU and MPS are untested.

programs.py has the passes and the profiler, clocks.py the accelerator clocks, internals.py private APIs and settings,
plain.py plain attention.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnbench.errors import UnknownName, UsageError
from attnbench.frameworks.base import Clock, Framework, Inputs, Peak, Program, Programs, Setting, WallClock, Watched
from attnbench.frameworks.host_memory import allocated
from attnbench.frameworks.numpy import cpu_facts, versions
from attnbench.frameworks.torch import programs
from attnbench.frameworks.torch.clocks import CLOCKS
from attnbench.frameworks.torch.internals import functions, refuse_modes, settings
from attnbench.frameworks.torch.plain import TorchNamespace
from attnbench.masks import Namespace
from attnbench.spec import Array, Call, Environment, Layout, Pass

PACKAGES = (
    "triton", "numpy", "transformers", "flash-attn", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl", "xformers",
    "flashinfer-python", "sageattention", "transformer-engine",
)  # fmt: skip
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
DEVICE_CLOCKS = {"cuda": ("events", "kernel", "graph"), "rocm": ("events", "kernel", "graph"), "xpu": ("events",)}


class TorchFramework(Framework):
    """Adapter of torch."""

    name = "torch"
    overwrites = True

    def devices(self) -> tuple[str, ...]:
        gpu = "rocm" if torch.version.hip else "cuda"
        found = ((gpu, torch.cuda), ("xpu", torch.xpu), ("mps", torch.mps))
        return (*(kind for kind, module in found if module.is_available()), "cpu")

    def environment(self, device: str) -> Environment:
        facts = cpu_facts()
        facts["device_name"] = facts["cpu"]
        if device != "cpu":
            kind = _torch_device(device)
            module = torch.get_device_module(kind)
            facts["device_name"] = getattr(module, "get_device_name", lambda: kind)()
            facts["devices"] = module.device_count()
            if hasattr(module, "mem_get_info"):
                facts["free_bytes"], facts["memory_bytes"] = module.mem_get_info()
            if kind == "cuda":
                facts["capability"] = torch.cuda.get_device_capability()
        packages = {"torch": str(torch.__version__), **versions(*PACKAGES)}
        return Environment(
            device=device, framework="torch", threads=torch.get_num_threads(), packages=packages, **facts
        )

    def settings(self) -> Mapping[str, Setting]:
        return settings()

    def functions(self) -> Sequence[tuple[str, Any, Watched]]:
        return functions()

    def namespace(self, device: str) -> Namespace:
        # MPS has no float64.
        return TorchNamespace(_torch_device(device), exact=device != "mps")

    def array(self, values: np.ndarray, dtype: str, device: str) -> Array:
        return torch.from_numpy(np.array(values, order="C")).to(getattr(torch, dtype)).to(_torch_device(device))

    def numpy(self, array: Array) -> np.ndarray:
        array = array.detach()
        return (array.float() if array.dtype in (torch.bfloat16, torch.float16) else array).cpu().numpy()

    def dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def cast(self, array: Array, dtype: str) -> Array:
        return array.to(self.dtype(dtype))

    def owns(self, value: Any) -> bool:
        return programs.owned(value)

    def transpose(self, array: Array, source: Layout, target: Layout) -> Array:
        return array if source == target else array.transpose(1, 2).contiguous()

    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        torch.set_float32_matmul_precision("highest")  # without TF32; for measuring only, never in production
        return programs.make_programs(call, pass_, example)

    def wait(self, tree: Any) -> None:
        while isinstance(tree, (tuple, list)) and tree:
            tree = tree[0]
        if isinstance(tree, torch.Tensor):
            programs.synchronize(tree.device.type)
        elif torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def snapshot(self, tree: tuple[Array, ...]) -> tuple[Array, ...]:
        refuse_modes()
        return tuple(array.detach().clone(memory_format=torch.contiguous_format) for array in tree)

    def checksum(self, array: Array) -> bytes:
        """Return a digest of sums of the bits along each of the last two axes, so that little comes to the host."""
        bits = _bits(array.detach())
        bits = bits.reshape(-1, *bits.shape[-2:]) if bits.ndim > 1 else bits.reshape(1, 1, -1)
        sums = [bits.sum(axis, dtype=torch.int64).cpu().numpy() for axis in (-1, -2)]
        return hashlib.blake2b(b"".join(one.tobytes() for one in sums)).digest()

    def same_bits(self, a: Array, b: Array) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(*(_bits(array.detach().contiguous()) for array in (a, b)))

    def is_finite(self, array: Array) -> bool:
        return bool(array.detach().isfinite().all())

    def put(self, array: Array, index: tuple[Any, ...], value: float) -> Array:
        copy = array.detach().clone()
        copy[tuple(torch.from_numpy(i).to(copy.device) if isinstance(i, np.ndarray) else i for i in index)] = value
        return copy

    def overwrite(self, array: Array, values: Array) -> None:
        # Unlike detach(), .data has a version counter of its own.
        array.data.copy_(values)

    def multiply(self, array: Array, factors: np.ndarray) -> Array:
        return array.detach() * torch.from_numpy(np.array(factors)).to(array)

    def clocks(self, device: str) -> tuple[str, ...]:
        return DEVICE_CLOCKS.get(device, ("wall",))

    def clock(self, name: str, device: str) -> Clock:
        if name == "wall":
            return WallClock(self)
        if name not in self.clocks(device):
            raise UnknownName(f"clock on {device}", name, ("wall", *self.clocks(device)), "attnbench doctor")
        return CLOCKS[name](_torch_device(device), self.snapshot)

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        if device == "cpu":
            return programs.cpu_peak(program, inputs)
        return programs.accelerator_peak(program, inputs, _torch_device(device))

    def held(self, device: str) -> int | None:
        if device == "cpu":
            return allocated()
        module = torch.get_device_module(_torch_device(device))
        return int(module.memory_allocated()) if hasattr(module, "memory_allocated") else None

    def kernels(self, program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
        return programs.kernel_names(program, inputs, _torch_device(device))

    def trace(self, program: Program, inputs: Inputs, path: Path, device: str) -> Path:
        return programs.write_trace(program, inputs, path, _torch_device(device))

    def matmul(self, size: int, dtype: str, device: str) -> Program:
        torch.set_float32_matmul_precision("highest")
        a, b = (torch.randn(size, size, device=_torch_device(device)).to(getattr(torch, dtype)) for _ in range(2))
        return Program(run=lambda _: (a @ b, a, b), prepare=lambda _: None)

    def copy(self, size_bytes: int, device: str) -> Program:
        source = torch.rand(max(1, size_bytes // 4), device=_torch_device(device))
        target = torch.empty_like(source)
        return Program(run=lambda _: (target.copy_(source), source), prepare=lambda _: None)

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)

    def reset(self) -> None:
        if "torch._dynamo" in sys.modules:  # importing it takes seconds, and who has not compiled has nothing to reset
            torch._dynamo.reset()
        self.trim()

    def trim(self) -> None:
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def _bits(array: Array) -> Array:
    """View an array as whole numbers of the same width."""
    return array.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.dtype.itemsize])


def _torch_device(device: str) -> str:
    """Return torch's device string of our device kind (ROCm builds call their GPUs cuda)."""
    known = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "mps": "mps"}
    if device not in known:
        raise UsageError(f'torch has no device "{device}": use one of {", ".join(known)}.')
    return known[device]


FRAMEWORK = TorchFramework()
