"""The JAX adapter: everything is compiled ahead of time, with arrays as arguments and the whole output tree awaited.

A float64 workload runs under x64, a float32 one with full matmul precision, whatever the process's defaults are.
"""

from __future__ import annotations

import gc
import gzip
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from attnbench.errors import UsageError
from attnbench.frameworks.base import (
    Clock,
    Framework,
    Inputs,
    Peak,
    Program,
    Programs,
    Setting,
    WallClock,
    Watched,
)
from attnbench.frameworks.jax.clocks import KernelClock, cupti_problem, kernel_names
from attnbench.frameworks.jax.programs import Compiler, compile_step
from attnbench.frameworks.numpy import cpu_facts, versions
from attnbench.spec import Array, Call, Environment, Layout, Pass

PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu", "ml_dtypes", "numpy",
    "flax", "tokamax", "kvax", "jax-triton", "triton", "flash-attn-jax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip
LAYOUT_SWAP = (0, 2, 1, 3)
SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_platforms", "jax_default_device", "jax_debug_nans",
    "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_enable_checks", "jax_transfer_guard",
)  # fmt: skip
"""Settings of jax.config that a call may depend on; a float32 or float64 workload sets its own precision."""


def import_jax() -> Any:
    """Import JAX so that it takes device memory only as it needs it, since torch may share the card."""
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


@contextmanager
def precision_of(dtype: Any) -> Iterator[None]:
    """Trace and run in the precision the dtype asks for: x64 for float64, no TF32 for float32."""
    jax = import_jax()
    with ExitStack() as stack:
        if dtype == np.float64:
            stack.enter_context(jax.enable_x64(True))
        elif dtype == np.float32:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield


class JaxFramework(Framework):
    """CPU, CUDA, ROCm and TPU through XLA; only CPU and CUDA were ever run."""

    name = "jax"
    compiles = True

    def devices(self) -> tuple[str, ...]:
        kinds = [_kind(device) for device in import_jax().devices()]
        return tuple(dict.fromkeys([*kinds, "cpu"]))

    def environment(self, device: str) -> Environment:
        found = _device(device)
        facts: dict[str, Any] = cpu_facts()
        facts["device_name"] = facts["cpu"]
        if device != "cpu":
            facts |= _accelerator_facts(found)
        packages, facts["devices"] = versions(*PACKAGES), len(import_jax().devices(device))
        return Environment(device=device, framework=self.name, threads=facts["cores"], packages=packages, **facts)

    def settings(self) -> Mapping[str, Setting]:
        config = import_jax().config
        found = {name: Setting(str(getattr(config, name))) for name in SETTINGS if hasattr(config, name)}
        return found | {"jax_disable_jit": Setting(config.jax_disable_jit, refused=True)}

    def functions(self) -> Sequence[tuple[str, Any, Watched]]:
        jax = import_jax()
        library = Watched(harness=False)
        return (("jax", jax, library), ("jax.numpy", jax.numpy, library), ("jax.lax", jax.lax, library))

    def namespace(self, device: str) -> Any:
        del device  # constants follow the arrays they meet
        return import_jax().numpy

    def array(self, values: np.ndarray, dtype: str, device: str) -> Array:
        rounded = np.asarray(values).astype(self.dtype(dtype))
        with precision_of(rounded.dtype):
            return import_jax().device_put(rounded, _device(device))

    def numpy(self, array: Array) -> np.ndarray:
        values = np.asarray(array)
        return values.astype(np.float32) if values.dtype.itemsize == 2 and values.dtype.kind in "fV" else values

    def dtype(self, name: str) -> Any:
        return import_jax().numpy.dtype(name)

    def precision(self, dtype: str) -> AbstractContextManager[None]:
        return precision_of(self.dtype(dtype))

    def cast(self, array: Array, dtype: str) -> Array:
        with precision_of(self.dtype(dtype)):
            return array.astype(dtype)

    def owns(self, value: Any) -> bool:
        jax = import_jax()
        return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)

    def transpose(self, array: Array, source: Layout, target: Layout) -> Array:
        if source == target:
            return array
        with precision_of(array.dtype):
            return import_jax().numpy.transpose(array, LAYOUT_SWAP)

    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        return Compiler(import_jax(), call, example, precision_of).programs(pass_)

    def compiled(self, function: Callable[[Any], tuple[Array, ...]], state: Any) -> Programs:
        return compile_step(import_jax(), function, state)

    def wait(self, tree: Any) -> None:
        import_jax().block_until_ready(tree)

    def snapshot(self, tree: tuple[Array, ...]) -> tuple[Array, ...]:
        jnp = import_jax().numpy
        copies = []
        for leaf in tree:
            with precision_of(leaf.dtype):
                copies.append(jnp.array(leaf, copy=True))
        return tuple(copies)

    def part(self, array: Array, starts: Sequence[int], sizes: Sequence[int]) -> Array:
        with precision_of(array.dtype):  # compiled for the sizes, not for each place
            return import_jax().lax.dynamic_slice(array, [np.int32(start) for start in starts], sizes)

    def on_one_device(self, array: Array) -> Array:
        devices = sorted(array.devices(), key=lambda device: device.id)
        return array if len(devices) == 1 else import_jax().device_put(array, devices[0])

    def same_bits(self, a: Array, b: Array) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        jax = import_jax()
        bits = f"uint{8 * a.dtype.itemsize}"
        with precision_of(a.dtype):
            return bool((jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits)).all())

    def is_finite(self, array: Array) -> bool:
        with precision_of(array.dtype):
            return bool(import_jax().numpy.isfinite(array).all())

    def put(self, array: Array, index: tuple[Any, ...], value: float) -> Array:
        with precision_of(array.dtype):
            return array.at[index].set(value)

    def multiply(self, array: Array, factors: np.ndarray) -> Array:
        with precision_of(array.dtype):
            return array * np.asarray(factors).astype(array.dtype)

    def clocks(self, device: str) -> tuple[str, ...]:
        return ("wall",) if self._no_kernels(device) else ("kernel", "wall")

    def clock(self, name: str, device: str) -> Clock:
        if name == "wall":
            return WallClock(self)
        if name != "kernel":
            raise UsageError(f'jax has no clock "{name}" on {device}: choose from {", ".join(self.clocks(device))}.')
        problem = self._no_kernels(device)
        if problem:
            raise UsageError(f"the kernel clock does not work on {device}: {problem}. Use the wall clock.")
        return KernelClock(self, _device(device))

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        if temp_bytes is None:
            return Peak(None, "the compiler did not say how much scratch memory the program needs")
        outputs = program.run(program.prepare(inputs))
        self.wait(outputs)
        size = temp_bytes + sum(leaf.nbytes for leaf in outputs)
        stats = _device(device).memory_stats() or {}
        reserved = next(
            (stats[key] for key in ("peak_pool_bytes", "pool_bytes", "bytes_reserved") if key in stats), None
        )
        return Peak(size, None, reserved, None, "xla compiled temp + outputs")

    def kernels(self, program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
        problem = self._no_kernels(device)
        if problem:
            return None, problem
        return kernel_names(program, inputs), None

    def _no_kernels(self, device: str) -> str | None:
        if device == "cpu":
            return "XLA on the CPU compiles the call into one module: there are no kernels to name"
        if device != "cuda":
            return f"kernels are seen through CUPTI, which {device} does not have"
        return cupti_problem(_device(device))

    def trace(self, program: Program, inputs: Inputs, path: Path, device: str) -> Path:
        jax = import_jax()
        state = program.prepare(inputs)
        self.wait(state)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, create_perfetto_trace=True):
                self.wait(program.run(state))
            found = sorted(Path(folder).rglob("perfetto_trace.json.gz"))
            if not found:
                raise UsageError(
                    "the JAX profiler wrote no Perfetto trace; is another profiler running in this process?"
                )
            return _store_trace(found[0], path)

    def matmul(self, size: int, dtype: str, device: str) -> Program:
        jax = import_jax()
        random = np.random.default_rng()
        a, b = (self.array(random.standard_normal((size, size), np.float32), dtype, device) for _ in range(2))
        with precision_of(a.dtype):
            compiled = jax.jit(jax.numpy.matmul).trace(a, b).lower().compile()
        return Program(run=lambda _: (compiled(a, b), a, b), prepare=lambda _: None)

    def copy(self, size_bytes: int, device: str) -> Program:
        # A choice made at run time, because a bare copy is a DMA transfer that no kernel clock sees.
        jax = import_jax()
        words = np.random.default_rng().integers(1, 1 << 32, max(1, size_bytes // 4), np.uint32)
        source, wanted = jax.device_put((words, np.True_), _device(device))
        compiled = jax.jit(lambda x, keep: jax.numpy.where(keep, x, 0)).trace(source, wanted).lower().compile()
        return Program(run=lambda _: (compiled(source, wanted), source), prepare=lambda _: None)

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, MemoryError):
            return True
        jax = import_jax()
        message = str(error)
        exhausted = "RESOURCE_EXHAUSTED" in message or "Out of memory" in message
        return isinstance(error, jax.errors.JaxRuntimeError) and exhausted

    def exact(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function under x64 and without TF32, so that float64 stays float64 and float32 is not rounded
        further."""
        jax = import_jax()
        compiled = jax.jit(function, compiler_options=QUICKLY_COMPILED)

        def run(*arrays: Array) -> Any:
            with jax.enable_x64(True), jax.default_matmul_precision("highest"):
                return compiled(*arrays)

        return run

    def reset(self) -> None:
        import_jax().clear_caches()
        gc.collect()


QUICKLY_COMPILED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Options for a program that runs a few times: on a GPU, trying out how its products are computed takes XLA far longer
than computing them."""


def _kind(device: Any) -> str:
    """Return the vendor of a JAX device, which calls both vendors' devices "gpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _device(kind: str) -> Any:
    jax = import_jax()
    try:
        return jax.devices(kind)[0]
    except RuntimeError as error:
        raise UsageError(f"jax has no {kind} device here: {error}") from error


def _accelerator_facts(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {}
    total = stats.get("bytes_limit")
    capability = getattr(device, "compute_capability", None)
    return {
        "device_name": device.device_kind,
        "memory_bytes": total,
        "free_bytes": None if total is None else total - stats.get("bytes_in_use", 0),
        "capability": _version_pair(capability) if isinstance(capability, str) else None,
    }


def _version_pair(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _store_trace(found: Path, path: Path) -> Path:
    """Store the trace at a path: unpacked if the name ends in .json, packed otherwise."""
    if path.is_dir():
        path = path / found.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        with gzip.open(found) as packed, path.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    else:
        shutil.copyfile(found, path)
    return path


FRAMEWORK = JaxFramework()
