"""Figures that follow from a time: TFLOP/s, GB/s, share of the measured roofline, tokens per second, limit by the host.

Whether the device waited for the host is not stored: every reader derives it from the clocks in a record, of older
files too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from attnbench.spec import Cost, Ok, Record, Throughput, Workload
from attnbench.workloads.cost import demand

IMPLAUSIBLE = 1.10
"""Share of a measured ceiling above which a figure is not published."""


class Ceilings(Struct, frozen=True):
    """Rates that this device reached in a large matrix product and a large copy, measured here."""

    flops_per_s: Annotated[float, Meta(gt=0)]
    bytes_per_s: Annotated[float, Meta(gt=0)]
    cache_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of data that may be served from cache, for which the copy ceiling does not hold."""


def cost_of(
    workload: Workload, time_ns: float | None, ceilings: Ceilings | None, work: float = 1.0, devices: int = 1
) -> Cost:
    """Return the demand of a workload and, if it was timed, its rates; the ceilings are those of one device.

    `work` is the share of the products that an implementation computes if it leaves some out.
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
    """Return why a rate cannot be true, or None."""
    if cost.roofline is None or cost.roofline <= IMPLAUSIBLE:
        return None
    return (
        f"implausible: {cost.roofline:.2f} x the measured {cost.bound} ceiling of this device "
        f"({cost.tflops:.3g} TFLOP/s, {cost.gb_per_s:.3g} GB/s); the work was not done, or not timed"
    )


def above_roofline(cost: Cost) -> tuple[str, ...]:
    """Return a note if a published rate lies above the measured ceiling."""
    if cost.roofline is None or cost.roofline <= 1:
        return ()
    other = "it is that of a copy, and reading alone is faster; or it" if cost.bound == "memory" else "it"
    return (f"above the measured {cost.bound} ceiling: {other} was measured in a slow moment, or work was left out",)


def throughput_of(workload: Workload, time_ns: float) -> Throughput:
    """Return query tokens, calls and batch rows per second."""
    per_s = 1e9 / time_ns
    return Throughput(
        tokens_per_s=workload.batch * workload.q_len * per_s, calls_per_s=per_s, samples_per_s=workload.batch * per_s
    )


BOUND = {"wall": 2.0, "events": 1.5}
"""Ratio of call time to kernel time from which on the host is the limit, by the clock of the whole call. A wall time
contains the kernels and then the host: twice means that the host takes longer. Events begin when the host is ahead:
what they contain beyond the kernels and the gaps between them is a device that waited."""
KERNELS_ONLY = "kernels only"
"""Clock of older records of JAX: device time without copies and fills, for which a call does wait."""
HOST_LIMITED = "host-limited"
"""Beginning of the note in such a record."""


class CallTime(Struct, frozen=True):
    """Time of the kernels, and of the whole call by the clock named."""

    kernel_ns: float
    call_ns: float
    clock: str

    @property
    def ratio(self) -> float:
        """Time of the call divided by the time of its kernels."""
        return self.call_ns / self.kernel_ns

    @property
    def bound(self) -> bool:
        """Whether the host takes longer than the kernels."""
        return self.ratio >= BOUND[self.clock]


def call_time(record: Ok) -> CallTime | None:
    """Return the times of kernels and call in a record, by the clock that shows a wait if one does; None if it lacks
    either."""
    kernel = _median(record, "kernel") or _median(record, KERNELS_ONLY)
    known = [(name, ns) for name in BOUND if (ns := _median(record, name)) is not None]
    if kernel is None or not known:
        return None
    times = [CallTime(kernel, ns, clock) for clock, ns in known]
    return next((one for one in times if one.bound), times[0])


def host_limit(record: Record) -> float | None:
    """Return the ratio of call time to kernel time if the host is the limit; else None."""
    times = call_time(record) if isinstance(record, Ok) else None
    return times.ratio if times is not None and times.bound else None


def notes_of(record: Ok) -> tuple[str, ...]:
    """Return the notes of a record, including one if the host is the limit."""
    ratio = host_limit(record)
    own = () if ratio is None else (f"{HOST_LIMITED}: the call takes {ratio:.1f}x its kernel time",)
    return (*record.notes, *own)


def describe_host_limit(records: Iterable[Ok]) -> str:
    """Return the words to add to a recommendation of these records; empty if their devices never wait for the host."""
    every = list(records)
    ratios = [ratio for one in every if (ratio := host_limit(one)) is not None]
    if not ratios:
        return ""
    where = "" if len(ratios) == len(every) else f" on {len(ratios)} of {len(every)} shapes"
    most = "" if len(ratios) == 1 else "up to "
    return f"{HOST_LIMITED}{where}: the call takes {most}{max(ratios):.1f}x its kernel time"


def _median(record: Ok, clock: str) -> float | None:
    if record.time is not None and record.time.clock == clock:
        return record.time.median_ns
    return record.also[clock].median_ns if clock in record.also else None
