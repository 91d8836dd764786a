"""rates"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from attnbench.spec import Cost, Ok, Record, Throughput, Workload
from attnbench.workloads.cost import demand

IMPLAUSIBLE = 1.10
"""Share of a measured ceiling above which a figure is not published."""


class Ceilings(Struct, frozen=True):
    """What this device reached in a large matrix product and a large copy, measured, not read off a data sheet."""

    flops_per_s: float
    bytes_per_s: float
    cache_bytes: int = 0
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


BOUND = {"wall": 2.0, "events": 1.5}
"""Clock of the whole call -> its time over that of the kernels from which on the host is what is waited for, however
long the call. A wall time holds the kernels and then the host: twice means that the host takes longer. Events begin
when the host is ahead: what they hold beyond the kernels and the gaps between them is a device that ran dry."""
HOST_LIMITED = "host-limited"
"""How the note of such a record begins."""


class CallTime(Struct, frozen=True):
    """Time of the kernels and of the whole call, by the clock named."""

    kernel_ns: float
    call_ns: float
    clock: str

    @property
    def ratio(self) -> float:
        """Time of the call / time of its kernels."""
        return self.call_ns / self.kernel_ns

    @property
    def bound(self) -> bool:
        """Whether the host takes longer than the kernels."""
        return self.ratio >= BOUND[self.clock]


def call_time(record: Ok) -> CallTime | None:
    """Return kernels and call of a record, by the clock that shows a wait if one does; None if it lacks either."""
    kernel = _median(record, "kernel")
    known = [(name, ns) for name in BOUND if (ns := _median(record, name)) is not None]
    if kernel is None or not known:
        return None
    found = [CallTime(kernel, ns, clock) for clock, ns in known]
    return next((one for one in found if one.bound), found[0])


def host_limit(record: Record) -> float | None:
    """Return how many times as long as its kernels a call takes, if the host is what it waits for; else None."""
    found = call_time(record) if isinstance(record, Ok) else None
    return found.ratio if found is not None and found.bound else None


def notes_of(record: Ok) -> tuple[str, ...]:
    """Return the notes of a record, and one more if its host is the limit."""
    ratio = host_limit(record)
    own = () if ratio is None else (f"{HOST_LIMITED}: the call takes {ratio:.1f}x its kernel time",)
    return (*record.notes, *own)


def told_host_limit(records: Iterable[Ok]) -> str:
    """Return what a sentence that recommends these must add; empty if their devices never wait for the host."""
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
