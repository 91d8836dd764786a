"""One arm's turn in a comparison: several calls, by wall time and by CPU or device time at once."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from time import perf_counter_ns, process_time_ns

import numpy as np

from attnbench.comparison import Block
from attnbench.frameworks import Clock, Framework, Inputs, Program
from attnbench.frameworks.base import OwnClock, Samples, WallClock
from attnbench.measuring.gpu_state import gpu_state

WALL_SHARE = 8
"""On an accelerator one in so many calls is timed by the wall clock too."""


def take_block(
    framework: Framework, device: str, clock: Clock, program: Program, inputs: Sequence[Inputs], calls: int
) -> tuple[Block, Samples]:
    """Nanoseconds per call by each metric, and what the last call gave."""
    if clock.name == OwnClock.name:  # the processor's time of this process is not that of the ranks
        taken = clock.sample(program, inputs, calls)
        return Block({"wall": float(np.median(taken.ns))}), taken
    if device != "cpu" and clock.name != "wall":
        return _on_device(framework, clock, program, inputs, calls)
    prepared = [program.prepare(inputs[call % len(inputs)]) for call in range(calls)]
    framework.wait(prepared)
    wait, run, output = framework.wait, program.run, ()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    cpu, wall = process_time_ns(), perf_counter_ns()
    for state in prepared:
        output = run(state)
        wait(output)
    wall, cpu = perf_counter_ns() - wall, process_time_ns() - cpu
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    # A call that only sleeps has used no CPU time at all: a nanosecond keeps its ratio defined.
    ns = {"wall": wall / calls, "cpu": max(cpu, 1) / calls}
    return Block(ns, switches), Samples([ns["wall"]], framework.snapshot(output), (calls - 1) % len(inputs))


def _on_device(
    framework: Framework, clock: Clock, program: Program, inputs: Sequence[Inputs], calls: int
) -> tuple[Block, Samples]:
    wall = WallClock(framework).sample(program, inputs, max(1, calls // WALL_SHARE))
    taken = clock.sample(program, inputs, calls)
    state = gpu_state()
    mhz, throttled = (None, False) if state is None else state
    return Block({"device": float(np.median(taken.ns)), "wall": float(np.median(wall.ns))}, 0, mhz, throttled), taken
