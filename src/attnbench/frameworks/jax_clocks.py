"""The clock "kernel" on CUDA: all device work of a call (kernels, copies, fills), as the clock of torch counts it.

Each timed call follows a flush of the L2 cache, and the flush's own kernel, whose name is learned first, marks where
one call ends and the next begins in CUPTI's list.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from attnbench.frameworks import cupti
from attnbench.frameworks.base import UNWATCHED, Clock, Framework, Inputs, InputSets, Program, Samples, Watch
from attnbench.frameworks.cupti import CuptiFailed, Work

FLUSH_BYTES = 256 << 20
"""Twice the largest L2 so far (a B200's 126 MB): JAX does not tell the device's."""
PREPARED = 2
"""Inputs that are prepared for a visit: preparing between calls would be seen by the profiler."""


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
        seen = cupti.record(lambda: _flush_then_wait(flush))
    except CuptiFailed as error:
        return str(error)
    return None if seen else "CUPTI saw no kernel of a program that has one; is another profiler attached?"


class KernelClock(Clock):
    """Sum of the durations of all device work of one call, each call after an L2 flush."""

    name = "kernel"
    repeats_inputs = True

    def __init__(self, framework: Framework, device: Any) -> None:
        self._framework = framework
        self._flush = Flush(device)
        self._flush_names = frozenset(work.name for work in cupti.record(lambda: _flush_then_wait(self._flush)))

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

        seen = cupti.record(body)
        for call, output in zip(picked, kept):
            watch.look(call % len(prepared), output)
        each = split_calls(seen, self._flush_names, count * calls)
        ns = [sum(each[start : start + calls]) / calls for start in range(0, len(each), calls)]
        return Samples(ns)


def split_calls(seen: Sequence[Work], flush_names: frozenset[str], calls: int) -> list[float]:
    """Return the nanoseconds of device work of each call, leaving out the flushes between calls."""
    totals: list[float] = []
    counts: list[int] = []
    after_flush = False
    for work in seen:
        if work.name in flush_names:
            if not after_flush:
                totals.append(0.0)
                counts.append(0)
            after_flush = True
            continue
        after_flush = False
        if not totals:
            raise CuptiFailed(f"{work.name} ran before the first flush: something else uses this process's GPU")
        totals[-1] += work.ns
        counts[-1] += 1
    if len(totals) != calls or 0 in counts:
        raise CuptiFailed(
            f"CUPTI saw {len(totals)} calls ({counts.count(0)} of them without device work) where {calls} were made: "
            "it may have dropped records; take fewer samples at once or use the wall clock"
        )
    if len(set(counts)) > 1:
        raise CuptiFailed(f"one call did {min(counts)} pieces of device work and another {max(counts)}")
    return totals


def kernel_names(program: Program, inputs: Inputs) -> list[str]:
    """List the kernels, copies and fills of one call, in order without repeats."""
    import jax

    state = jax.block_until_ready(program.prepare(inputs))
    seen = cupti.record(lambda: jax.block_until_ready(program.run(state)))
    return list(dict.fromkeys(work.name for work in seen))
