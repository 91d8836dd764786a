"""A block, one side's turn in a comparison: several calls by wall time and by CPU or device time, with the GPU's
clock."""

from __future__ import annotations

import ctypes
import resource
from functools import cache
from time import perf_counter_ns, process_time_ns
from typing import Any, NamedTuple

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

WALL_SHARE = 8
"""Number of calls by the device's clock for each call by the wall clock, on an accelerator."""


def take_block(
    framework: Framework,
    device: str,
    clock: Clock,
    program: Program,
    inputs: InputSets,
    calls: int,
    watch: Watch = UNWATCHED,
) -> Block:
    """Time some calls and return nanoseconds per call by each metric."""
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


class GpuState(NamedTuple):
    """Clock of the multiprocessors; `throttled`: heat or the power supply slows them down. The ordinary power limit,
    under which heavy kernels always run, does not count, since the clock shows it."""

    sm_mhz: float
    throttled: bool


def gpu_state() -> GpuState | None:
    """Read the clock of the GPU in use; None if the driver does not tell it."""
    handle = nvml_handle()
    if handle is None:
        return None
    import pynvml

    try:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except pynvml.NVMLError:
        return None
    return GpuState(float(clock), bool(bits & _slowdowns()))


@cache
def nvml_handle() -> Any:
    """Return NVML's handle of the GPU that this process calls device 0; None if there is none.

    NVML numbers all cards of the machine by bus address; CUDA numbers those that CUDA_VISIBLE_DEVICES names, by speed
    unless CUDA_DEVICE_ORDER says otherwise. So the card is found by its bus address. Call this after the framework was
    used: it initialises CUDA, which a process that forks later must not do.
    """
    import pynvml

    address = _bus_address()
    if address is None:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByPciBusId(address)
    except pynvml.NVMLError:
        return None


def _bus_address() -> bytes | None:
    """Ask the CUDA driver for the bus address of device 0, such as b"00000000:3B:00.0"."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    return None if failed or driver.cuDeviceGetPCIBusId(address, len(address), device) else address.value


def _slowdowns() -> int:
    import pynvml

    return (
        pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
