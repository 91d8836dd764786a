"""Time and demand -> rates: TFLOP/s, GB/s, share of the measured roofline, tokens per second."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from attnbench.spec import Cost, Throughput, Workload
from attnbench.workloads.cost import demand

IMPLAUSIBLE = 1.10
"""Share of a measured ceiling above which a figure is not published."""


class Ceilings(Struct, frozen=True):
    """What this device reached in a large matrix product and a large copy, measured, not read off a data sheet."""

    flops_per_s: Annotated[float, Meta(gt=0)]
    bytes_per_s: Annotated[float, Meta(gt=0)]
    cache_bytes: Annotated[int, Meta(ge=0)] = 0
    """Data up to this size may be served from cache, where the copy ceiling does not hold."""


def cost_of(
    workload: Workload, time_ns: float | None, ceilings: Ceilings | None, work: float = 1.0, devices: int = 1
) -> Cost:
    """The demand of a workload and, when it was timed, the rates it was met with; ceilings are those of one device.

    `work` is the share of the products that an implementation which leaves some out really computes.
    """
    need = demand(workload)
    flops = round(need.flops * work)
    if time_ns is None:
        return Cost(flops=flops, bytes=need.bytes, reason="not timed")
    seconds = time_ns * 1e-9
    cost = Cost(
        flops=flops,
        bytes=need.bytes,
        tflops=flops / seconds / 1e12,
        gb_per_s=need.bytes / seconds / 1e9,
        reason="no ceiling was measured for this device and dtype" if ceilings is None else None,
    )
    if ceilings is None:
        return cost
    compute = flops / ceilings.flops_per_s / devices
    memory = need.bytes / ceilings.bytes_per_s / devices if need.bytes > ceilings.cache_bytes else 0.0
    bound = "compute" if compute >= memory else "memory"
    return msgspec.structs.replace(cost, roofline=max(compute, memory) / seconds, bound=bound)


def implausible(cost: Cost) -> str | None:
    """Why a figure cannot be true, or None."""
    if cost.roofline is None or cost.roofline <= IMPLAUSIBLE:
        return None
    return (
        f"implausible: {cost.roofline:.2f} x the measured {cost.bound} ceiling of this device "
        f"({cost.tflops:.3g} TFLOP/s, {cost.gb_per_s:.3g} GB/s); the work was not done, or not timed"
    )


def above_roofline(cost: Cost) -> tuple[str, ...]:
    """A note where a figure that is published lies above what was measured to be the limit."""
    if cost.roofline is None or cost.roofline <= 1:
        return ()
    other = "it is a copy's, and reading alone is quicker; or that" if cost.bound == "memory" else "that"
    return (f"above the measured {cost.bound} ceiling: {other} was measured in a slower moment, or work was left out",)


def throughput_of(workload: Workload, time_ns: float) -> Throughput:
    """Query tokens, calls and batch rows per second."""
    per_s = 1e9 / time_ns
    return Throughput(
        tokens_per_s=workload.batch * workload.q_len * per_s, calls_per_s=per_s, samples_per_s=workload.batch * per_s
    )
