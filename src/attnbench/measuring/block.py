"""One arm's turn in a comparison: several calls, by wall time and by CPU or device time at once."""

from __future__ import annotations

import resource
from time import perf_counter_ns, process_time_ns

import numpy as np

from attnbench.comparison import Block
from attnbench.frameworks import Clock, Framework, Program
from attnbench.frameworks.base import (
    UNWATCHED,
    InputSets,
    OwnClock,
    WallClock,
    Watch,
    cut_after,
    hooks,
    require_unhooked,
)
from attnbench.measuring.gpu_state import gpu_state

WALL_SHARE = 8
"""On an accelerator one in so many calls is timed by the wall clock too."""


def take_block(
    framework: Framework,
    device: str,
    clock: Clock,
    program: Program,
    inputs: InputSets,
    calls: int,
    watch: Watch = UNWATCHED,
) -> Block:
    """Nanoseconds per call by each metric."""
    if clock.name == OwnClock.name:  # the processor's time of this process is not that of the ranks
        return Block({"wall": float(np.median(clock.sample(program, inputs, calls, 1, watch).ns))})
    if device != "cpu" and clock.name != "wall":
        return _on_device(framework, clock, program, inputs, calls, watch)
    prepared = [program.prepare(inputs[call % len(inputs)]) for call in range(calls)]
    framework.wait(prepared)
    wait, run, output, kept = framework.wait, program.run, (), []
    picked = watch.pick(calls)
    pieces = cut_after(prepared, picked)
    before = hooks()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    cpu, wall = process_time_ns(), perf_counter_ns()
    for piece in pieces:
        for state in piece:
            output = run(state)
            wait(output)
        kept.append(output)
    after = hooks()
    wall, cpu = perf_counter_ns() - wall, process_time_ns() - cpu
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    require_unhooked(before, after)
    for index, found in zip(picked, kept):
        watch.look(index, found)
    # A call that only sleeps has used no CPU time at all: a nanosecond keeps its ratio defined.
    ns = {"wall": wall / calls, "cpu": max(cpu, 1) / calls}
    return Block(ns, switches)


def _on_device(
    framework: Framework, clock: Clock, program: Program, inputs: InputSets, calls: int, watch: Watch
) -> Block:
    wall = WallClock(framework).sample(program, inputs, max(1, calls // WALL_SHARE), 1, watch)
    taken = clock.sample(program, inputs, calls, 1, watch)
    state = gpu_state()
    mhz, throttled = (None, False) if state is None else state
    return Block({"device": float(np.median(taken.ns)), "wall": float(np.median(wall.ns))}, 0, mhz, throttled)
