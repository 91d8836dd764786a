"""NumPy as a framework: eager, on the CPU, gradients only if a call brings its own `vjp`."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from attnbench.errors import UnknownName, Unsupported
from attnbench.frameworks.base import Clock, Framework, Inputs, Peak, Program, Programs, Setting, WallClock, unseen
from attnbench.frameworks.host_memory import allocated, host_memory
from attnbench.masks import Namespace
from attnbench.processes import mapped_files
from attnbench.spec import Array, Call, Environment, Layout, Pass

BLAS_COUNTERS = (
    "scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads64_",
    "openblas_get_num_threads", "MKL_Get_Max_Threads",
)  # fmt: skip
CPU_FACTS = (
    ("vendor_id", "cpu family", "model", "flags"),
    ("CPU implementer", "CPU architecture", "CPU part", "Features"),
)
"""Names in /proc/cpuinfo of vendor, family, model and instructions, on x86 and on Arm."""
VECTORS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve", "sve2")
"""Instructions for which libraries have kernels of their own."""
THREADS = "remove that call and pass --threads, which applies to every implementation that is measured"


def cpu_name() -> str:
    """Return the model name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processor_kind(text: str) -> str:
    """Return vendor, family, model and vector instructions of the first processor in the text of /proc/cpuinfo.

    Empty if it names no family (x86) and no part (Arm); the stepping is left out.
    """
    lines = (line.partition(":") for line in text.strip().partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    for vendor, family, model, flags in CPU_FACTS:
        if vendor in facts and model in facts:
            numbers = f"{facts[family]}-{facts[model]}" if family in facts else facts[model]
            found = facts.get(flags, "").split()
            return " ".join([facts[vendor], numbers, *(name for name in VECTORS if name in found)])
    return ""


@cache
def _processor() -> str:
    """Return the kind of this machine's processor, from the platform's words where there is no /proc/cpuinfo."""
    try:
        return processor_kind(Path("/proc/cpuinfo").read_text())
    except OSError:
        return re.sub(r" Stepping \d+", "", platform.processor() or platform.machine())


def cpu_facts() -> dict[str, Any]:
    """Return the fields of Environment that every framework on a CPU fills alike."""
    memory = host_memory()
    return {
        "cpu": cpu_name(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "memory_bytes": memory.total,
        "free_bytes": memory.available,
    }


@cache
def _blas_counters() -> tuple[Callable[[], int], ...]:
    """Return the functions that count the threads of the BLAS libraries in this process; none but on Linux."""
    counters: list[Callable[[], int]] = []
    for path in mapped_files():
        if not re.search(r"/[^/]*(openblas|mkl_rt)[^/]*\.so[^/]*$", path):
            continue
        with suppress(OSError):
            library = ctypes.CDLL(path)
            name = next((one for one in BLAS_COUNTERS if hasattr(library, one)), None)
            if name is not None:
                counters.append(getattr(library, name))
    return tuple(counters)


def versions(*names: str) -> dict[str, str]:
    """Return the versions of the distributions that are installed."""
    installed = {}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


class NumpyFramework(Framework):
    """Adapter of NumPy."""

    name = "numpy"
    overwrites = True

    def devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def environment(self, device: str) -> Environment:
        facts = cpu_facts()
        # Threads of the outermost level: "4,2" has two levels.
        openmp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return Environment(
            device="cpu",
            device_name=facts["cpu"],
            framework="numpy",
            threads=(int(openmp) if openmp.isdecimal() else 0) or facts["cores"],
            packages=versions("numpy"),
            **facts,
        )

    def settings(self) -> Mapping[str, Setting]:
        threads = tuple(count() for count in _blas_counters())
        return {"threads of NumPy's BLAS": Setting(threads, refused=True, remedy=THREADS)}

    def namespace(self, device: str) -> Namespace:
        return np  # pyright: ignore[reportReturnType]

    def array(self, values: np.ndarray, dtype: str, device: str) -> Array:
        if dtype == "bfloat16":
            raise Unsupported("NumPy has no bfloat16")
        return np.ascontiguousarray(values, dtype)

    def numpy(self, array: Array) -> np.ndarray:
        return array.astype(np.float32) if array.dtype == np.float16 else array

    def dtype(self, name: str) -> Any:
        return np.dtype(name)

    def cast(self, array: Array, dtype: str) -> Array:
        return array.astype(dtype)

    def owns(self, value: Any) -> bool:
        return type(value) is np.ndarray

    def transpose(self, array: Array, source: Layout, target: Layout) -> Array:
        return array if source == target else np.ascontiguousarray(array.transpose(0, 2, 1, 3))

    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        forward = Program(lambda x: (call(x.q, x.k, x.v),))
        if pass_ == "forward":
            return Programs(forward, 0)
        vjp = getattr(call, "vjp", None)
        if vjp is None:
            raise Unsupported("NumPy has no automatic differentiation, and this call does not define vjp")
        backward = Program(lambda x: tuple(vjp(*x)), Inputs.settled)
        if pass_ == "backward":
            return Programs(backward, 0)
        train = Program(lambda x: (call(x.q, x.k, x.v), *vjp(*x)), Inputs.settled)
        return Programs(train, 0, {"forward": forward, "backward": backward})

    def wait(self, tree: Any) -> None:
        """Return at once: a call of NumPy ends when its result is there."""

    def snapshot(self, tree: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x.copy() for x in tree)

    def checksum(self, array: Array) -> bytes:
        return hashlib.blake2b(array.tobytes()).digest()

    def same_bits(self, a: Array, b: Array) -> bool:
        return a.shape == b.shape and a.tobytes() == b.tobytes()

    def is_finite(self, array: Array) -> bool:
        return bool(np.isfinite(array).all())

    def put(self, array: Array, index: tuple[Any, ...], value: float) -> Array:
        changed = array.copy()
        changed[index] = value
        return changed

    def overwrite(self, array: Array, values: Array) -> None:
        array[...] = values

    def multiply(self, array: Array, factors: np.ndarray) -> Array:
        return array * factors.astype(array.dtype)

    def clocks(self, device: str) -> tuple[str, ...]:
        return ("wall",)

    def clock(self, name: str, device: str) -> Clock:
        if name != "wall":
            raise UnknownName(f"clock on {device}", name, ("wall",), "attnbench doctor")
        return WallClock(self)

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        prepared = program.prepare(inputs)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            output = program.run(prepared)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        made = [array for array in output if not any(np.may_share_memory(array, given) for given in inputs)]
        if peak < sum(array.nbytes for array in made):
            return unseen("NumPy")
        return Peak(peak, method="tracemalloc (NumPy reports every buffer)")

    def held(self, device: str) -> int | None:
        return allocated()

    def kernels(self, program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
        return None, "NumPy has no profiler of its own"

    def trace(self, program: Program, inputs: Inputs, path: Path, device: str) -> Path:
        prepared = program.prepare(inputs)
        start = time.perf_counter_ns()
        program.run(prepared)
        event = {"name": "call", "ph": "X", "ts": 0, "dur": (time.perf_counter_ns() - start) / 1e3, "pid": 1, "tid": 1}
        path.write_text(json.dumps({"traceEvents": [event]}))
        return path

    def matmul(self, size: int, dtype: str, device: str) -> Program:
        rng = np.random.default_rng()
        a, b = (rng.standard_normal((size, size)).astype(dtype) for _ in range(2))
        return Program(lambda _: (a @ b, a, b))

    def copy(self, size_bytes: int, device: str) -> Program:
        source = np.arange(size_bytes // 4, dtype=np.float32)
        target = np.empty_like(source)

        def run(_: Any) -> tuple[Array, ...]:
            np.copyto(target, source)
            return target, source

        return Program(run)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


FRAMEWORK = NumpyFramework()
