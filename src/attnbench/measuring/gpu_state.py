"""How fast an NVIDIA GPU's clock runs at this moment, and whether something holds it down."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple


class GpuState(NamedTuple):
    """Clock of the multiprocessors; `throttled`: heat or the power supply slows them down. The ordinary power limit,
    under which heavy kernels always run, does not count: the clock itself tells that."""

    sm_mhz: float
    throttled: bool


def gpu_state() -> GpuState | None:
    """None where the driver does not tell."""
    handle = _handle()
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
def _handle() -> Any:
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        return None


def _slowdowns() -> int:
    import pynvml

    return (
        pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
