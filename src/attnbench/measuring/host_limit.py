"""A record's own clocks -> whether its device waited for the host, so that a kernel time is not the time of a call.

Nothing is stored for it: every reader derives it from the times that a record holds, those of older files too.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from attnbench.spec import Ok, Record

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
