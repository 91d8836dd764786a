"""Kernel time on CUDA, through the CUPTI profiler that ships inside JAX (Mosaic GPU's).

Each timed call follows a flush of the L2 cache, and the flush's own kernel, whose name is learned first, marks where
one call ends and the next begins in the profiler's list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from attnbench.errors import AttnBenchError
from attnbench.frameworks.base import UNWATCHED, Clock, Framework, Inputs, InputSets, Program, Samples, Watch

FLUSH_BYTES = 256 << 20
"""Twice the largest L2 so far (a B200's 126 MB): JAX does not tell the device's."""
PREPARED = 2
"""Inputs that are prepared for a visit: preparing between calls would be seen by the profiler."""
MS_TO_NS = 1e6


class Kernel(NamedTuple):
    """One launch as CUPTI saw it."""

    name: str
    ms: float


class ProfilerFailed(AttnBenchError):
    """CUPTI could not be used, or what it saw makes no sense."""


class _Loop:
    """Looks like a jitted function, so that JAX's profiler calls it as it is instead of tracing it.

    The profiler calls it once to warm up and once under CUPTI: only the second call does the work.
    """

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body = body
        self._calls = 0

    def __call__(self) -> Any:
        self._calls += 1
        return self._body() if self._calls > 1 else None

    def trace(self) -> Any:
        raise NotImplementedError("a loop over compiled programs cannot be traced")

    lower = trace


def profile(body: Callable[[], Any]) -> list[Kernel]:
    """Run the body once under CUPTI; every kernel launched meanwhile, in order."""
    import jax

    try:
        from jax.experimental.mosaic.gpu import profiler

        measure = profiler.measure
    except (ImportError, AttributeError) as error:
        raise ProfilerFailed(
            f"jax {jax.__version__} has no jax.experimental.mosaic.gpu.profiler.measure ({error}); "
            "use the wall clock or another version"
        ) from error
    try:
        _, timings = measure(_Loop(body), aggregate=False)()
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise
        raise ProfilerFailed(f"CUPTI: {error}") from error
    return [Kernel(str(name), float(ms)) for name, ms in timings or []]


class Flush:
    """Rewrites a buffer larger than the L2 cache, in place."""

    def __init__(self, device: Any) -> None:
        import jax

        self._buffer = jax.device_put(np.zeros(FLUSH_BYTES // 4, np.uint32), device)
        # xor: an elementwise kernel name that attention does not use.
        rewrite = jax.jit(lambda x: x ^ np.uint32(1), donate_argnums=0)
        self._rewrite = rewrite.trace(self._buffer).lower().compile()
        self()

    def __call__(self) -> None:
        self._buffer = self._rewrite(self._buffer)

    def wait(self) -> None:
        """Until the buffer is written."""
        self._buffer.block_until_ready()


def _flush_then_wait(flush: Flush) -> None:
    flush()
    flush.wait()


@cache
def cupti_problem(device: Any) -> str | None:
    """None when CUPTI sees the kernels of this process, else why not. Tried, not guessed; the answer is kept."""
    flush = Flush(device)
    try:
        seen = profile(lambda: _flush_then_wait(flush))
    except ProfilerFailed as error:
        return str(error)
    return None if seen else "CUPTI saw no kernel of a program that has one; is another profiler attached?"


class KernelClock(Clock):
    """Sum of the kernels of one call, each call after an L2 flush."""

    name = "kernel"
    repeats_inputs = True

    def __init__(self, framework: Framework, device: Any) -> None:
        self._framework = framework
        self._flush = Flush(device)
        self._flush_names = frozenset(kernel.name for kernel in profile(lambda: _flush_then_wait(self._flush)))

    def sample(
        self, program: Program, inputs: InputSets, count: int, calls: int = 1, watch: Watch = UNWATCHED
    ) -> Samples:
        prepared = [program.prepare(inputs[which]) for which in range(min(PREPARED, len(inputs), count * calls))]
        # XLA launches its first calls one by one and records a CUDA graph then: let that be over.
        for state in prepared:
            self._framework.wait(program.run(state))
        picked = watch.pick(count * calls)  # their outputs are kept till the end: a copy would count as a kernel
        kept: list[tuple[Any, ...]] = []

        def body() -> None:
            for call in range(count * calls):
                self._flush()
                output = program.run(prepared[call % len(prepared)])
                self._framework.wait(output)
                if call in picked:
                    kept.append(output)

        kernels = profile(body)
        for call, output in zip(picked, kept):
            watch.look(call % len(prepared), output)
        each = split_calls(kernels, self._flush_names, count * calls)
        ns = [sum(each[start : start + calls]) * MS_TO_NS / calls for start in range(0, len(each), calls)]
        return Samples(ns)


def split_calls(kernels: Sequence[Kernel], flush_names: frozenset[str], calls: int) -> list[float]:
    """Milliseconds of each call, the flushes between them left out."""
    totals: list[float] = []
    launches: list[int] = []
    after_flush = False
    for kernel in kernels:
        if kernel.name in flush_names:
            if not after_flush:
                totals.append(0.0)
                launches.append(0)
            after_flush = True
            continue
        after_flush = False
        if not totals:
            raise ProfilerFailed(
                f"kernel {kernel.name} ran before the first flush: something else uses this process's GPU"
            )
        totals[-1] += kernel.ms
        launches[-1] += 1
    if len(totals) != calls or 0 in launches:
        raise ProfilerFailed(
            f"CUPTI saw {len(totals)} calls ({launches.count(0)} of them without a kernel) where {calls} were made: "
            "it may have dropped records; take fewer samples at once or use the wall clock"
        )
    if len(set(launches)) > 1:
        raise ProfilerFailed(f"the same call launched between {min(launches)} and {max(launches)} kernels")
    return totals


def kernel_names(program: Program, inputs: Inputs) -> list[str]:
    """Kernels of one call, in order without repeats."""
    import jax

    state = jax.block_until_ready(program.prepare(inputs))
    kernels = profile(lambda: jax.block_until_ready(program.run(state)))
    return list(dict.fromkeys(kernel.name for kernel in kernels))
