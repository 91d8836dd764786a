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
from time import perf_counter_ns
from typing import Any

import numpy as np

from attnbench.errors import UsageError
from attnbench.frameworks.base import Clock, Framework, Inputs, Peak, Program, Programs, Setting, WallClock, Watched
from attnbench.frameworks.jax.clocks import JaxKernelClock, cupti_problem, kernel_names
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
        jax_device = _device(device)
        facts: dict[str, Any] = cpu_facts()
        facts["device_name"] = facts["cpu"]
        if device != "cpu":
            facts |= _accelerator_facts(jax_device)
        packages, facts["devices"] = versions(*PACKAGES), len(import_jax().devices(device))
        return Environment(device=device, framework=self.name, threads=facts["cores"], packages=packages, **facts)

    def settings(self) -> Mapping[str, Setting]:
        config = import_jax().config
        settings = {name: Setting(str(getattr(config, name))) for name in SETTINGS if hasattr(config, name)}
        return settings | {"jax_disable_jit": Setting(config.jax_disable_jit, refused=True)}

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
        return Compiler(call, example).programs(pass_)

    def compiled(self, function: Callable[[Any], tuple[Array, ...]], state: Any) -> Programs:
        start = perf_counter_ns()
        with _no_persistent_cache():
            compiled = import_jax().jit(function).trace(state).lower().compile()
        spent = perf_counter_ns() - start
        return Programs(Program(run=lambda given: tuple(compiled(given))), spent, temp_bytes=_temp_bytes(compiled))

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
        return JaxKernelClock(self, _device(device))

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        if temp_bytes is None:
            return Peak(None, "the compiler did not report how much scratch memory the program needs")
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
            return f"kernels are traced by CUPTI, which {device} does not have"
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
            if path.is_dir():
                path = path / found[0].name
            path.parent.mkdir(parents=True, exist_ok=True)
            unpacked = path.suffix == ".json"
            with (gzip.open if unpacked else open)(found[0], "rb") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
            return path

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
        """Compile a function under x64 and without TF32, so that neither float64 nor float32 is rounded further."""
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
    pair = None
    if isinstance(capability, str):
        major, _, minor = capability.partition(".")
        pair = int(major), int(minor or 0)
    return {
        "device_name": device.device_kind,
        "memory_bytes": total,
        "free_bytes": None if total is None else total - stats.get("bytes_in_use", 0),
        "capability": pair,
    }


class Compiler:
    """Compiler of one call at one shape; arrays that the call captured are passed as arguments too.

    Compiled objects reject any other shape, so nothing can be compiled again while timed.
    """

    def __init__(self, call: Call, example: Inputs) -> None:
        self._jax = jax = import_jax()
        self._example = example
        self._compile_ns = 0
        start = perf_counter_ns()
        with precision_of(self._example.q.dtype):
            closed = jax.make_jaxpr(call)(*example[:3])
        if len(closed.out_avals) != 1:
            raise UsageError(f"the call must return one array, the output, but it returned {len(closed.out_avals)}.")
        # An array captured by closure would be folded at compile time, leaving nothing to time.
        self._captured = jax.device_put(list(closed.consts), next(iter(example.q.devices())))
        self._function = lambda captured, *qkv: jax.core.eval_jaxpr(closed.jaxpr, captured, *qkv)[0]
        self._compile_ns += perf_counter_ns() - start

    def programs(self, pass_: Pass) -> Programs:
        """Return the main program of the pass, and for train its two halves."""
        if pass_ == "forward":
            compiled = self._compile(self._function, self._captured, *self._example[:3])
            main = Program(run=lambda x: (compiled(self._captured, x.q, x.k, x.v),))
            return Programs(main, self._compile_ns, temp_bytes=_temp_bytes(compiled))
        if pass_ == "backward":
            _, main, temp = self._halves()
            return Programs(main, self._compile_ns, temp_bytes=temp)

        def train(captured: Any, q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
            out, pull_back = self._jax.vjp(lambda *qkv: self._function(captured, *qkv), q, k, v)
            return (out, *pull_back(dout))

        compiled = self._compile(train, self._captured, *self._example)
        main = Program(run=lambda x: tuple(compiled(self._captured, *x)), prepare=Inputs.settled)
        compile_ns = self._compile_ns
        forward, backward, _ = self._halves()
        return Programs(main, compile_ns, {"forward": forward, "backward": backward}, _temp_bytes(compiled))

    def _halves(self) -> tuple[Program, Program, int | None]:
        """Return a forward that keeps what backward needs, and a backward from that (a pytree, so it crosses jit)."""

        def keep(captured: Any, q: Array, k: Array, v: Array) -> Any:
            return self._jax.vjp(lambda *qkv: self._function(captured, *qkv), q, k, v)

        forward, (_, kept) = self._without_copies(keep, self._captured, *self._example[:3])
        backward = self._compile(lambda pull_back, dout: pull_back(dout), kept, self._example.dout)

        def prepare(x: Inputs) -> tuple[Any, Array]:
            # dO is made last, so that no work on it can be done in the forward pass, which is not timed.
            return forward(self._captured, x.q, x.k, x.v)[1], x.cotangent()

        return (
            Program(run=lambda x: (forward(self._captured, x.q, x.k, x.v)[0],)),
            Program(run=lambda state: tuple(backward(*state)), prepare=prepare),
            _temp_bytes(backward),
        )

    def _without_copies(self, function: Callable[..., Any], *arguments: Any) -> tuple[Callable[..., Any], Any]:
        """Return a compiled function and the shapes of its results, without copies of inputs that it returns.

        XLA would copy an output that is an input (Q, K and V, kept for the backward pass), and the copy would be timed;
        so such an input is passed on outside the compiled code.
        """
        tree = self._jax.tree_util
        with precision_of(self._example.q.dtype):
            traced = self._jax.jit(function).trace(*arguments)
        jaxpr, constants = traced.jaxpr.jaxpr, traced.jaxpr.consts
        place = {id(variable): n for n, variable in enumerate(jaxpr.invars)}
        through = {n: place[id(v)] for n, v in enumerate(jaxpr.outvars) if id(v) in place}
        made = [n for n in range(len(jaxpr.outvars)) if n not in through]
        shapes, structure = tree.tree_flatten(traced.out_info)

        def compute(*flat: Array) -> list[Array]:
            results = self._jax.core.eval_jaxpr(jaxpr, constants, *flat)
            return [results[n] for n in made]

        compiled = self._compile(compute, *tree.tree_leaves(arguments))

        def run(*given: Any) -> Any:
            flat = tree.tree_leaves(given)
            results = dict(zip(made, compiled(*flat))) | {n: flat[m] for n, m in through.items()}
            return tree.tree_unflatten(structure, [results[n] for n in range(len(shapes))])

        return run, traced.out_info

    def _compile(self, function: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter_ns()
        with precision_of(self._example.q.dtype), _no_persistent_cache():
            compiled = self._jax.jit(function).trace(*arguments).lower().compile()
        self._compile_ns += perf_counter_ns() - start
        return compiled


def _temp_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


@contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """Disable JAX's persistent cache, since reading compiled code from disk would be timed in place of compiling.

    JAX checks only once whether there is a cache, so it is made to check again.
    """
    jax = import_jax()
    if not jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


FRAMEWORK = JaxFramework()
