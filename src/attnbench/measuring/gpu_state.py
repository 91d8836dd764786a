"""How fast an NVIDIA GPU's clock runs at this moment, and whether something holds it down."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple


class GpuState(NamedTuple):
    """Clock of the multiprocessors; `throttled`: heat or the power supply slows them down. The ordinary power limit,
    under which heavy kernels always run, does not count: the clock itself tells that."""

    sm_mhz: float
    throttled: bool


def gpu_state() -> GpuState | None:
    """Read the clock of the GPU in use; None if the driver does not tell."""
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

    NVML numbers all cards of the machine by bus address, CUDA those that CUDA_VISIBLE_DEVICES names, by speed unless
    CUDA_DEVICE_ORDER says otherwise. So the card is found by its bus address. Call this after the framework was used:
    it initialises CUDA, which a process that forks later must not do.
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
