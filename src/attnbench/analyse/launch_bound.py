"""Tracks -> up to which length a GPU waits for its host, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from attnbench.analyse.advice import Figure, Recommendation, listed
from attnbench.analyse.families import Family, Track, length
from attnbench.analyse.fronts import exact
from attnbench.spec import Ok, Record

SHORT_NS = 50e3
"""A kernel this long hides its own launch."""
MUCH_LONGER = 2.0
"""Wall time over kernel time from which on the launch is what is waited for."""
ADVICE = {"jax": "put the whole step under one jax.jit, so that XLA can launch it as a CUDA graph"}
"""By framework; any other captures a graph itself."""
CAPTURE = "capture a CUDA graph"


class Wait(Struct, frozen=True):
    """Kernel and wall time of the fastest implementation at one length."""

    record: Ok
    kernel_ns: float
    wall_ns: float

    @property
    def bound(self) -> bool:
        """Whether launching takes longer than computing."""
        return self.kernel_ns < SHORT_NS and self.wall_ns >= MUCH_LONGER * self.kernel_ns


def launch_bound_of(family: Family, tracks: Mapping[Track, Mapping[str, Sequence[Record]]]) -> Recommendation | None:
    """One sentence for all batches of a family; None where both clocks were not read or nothing waits."""
    told, figures, seen = [], [], []
    for track, names in tracks.items():
        waits = _waits(names)
        bound = [wait for wait in waits if wait.bound]
        if not bound:
            continue
        longest = bound[-1]
        beyond = [wait for wait in waits if _length(wait) > _length(longest)]
        reach = "at" if longest is waits[0] else "up to"
        where = f"{track.title} {reach} {_length(longest):,} tokens"
        times = f"{_us(longest.kernel_ns)} of kernels in {_us(longest.wall_ns)}"
        told.append(f"{where} ({times}{f'; no longer at {_length(beyond[0]):,}' if beyond else ''})")
        for name, value in (("kernel", longest.kernel_ns), ("wall", longest.wall_ns)):
            figures.append(Figure(name=f"{name} time, {longest.record.cell.id}", value=value, unit="ns"))
        seen += [wait.record.workload.id for wait in waits]
    if not told:
        return None
    advice = ADVICE.get(family.framework, CAPTURE)
    return Recommendation(
        kind="launch-bound",
        family=family.title,
        device=family.device,
        text=f"{family.title}: launch-bound with {listed(told)}: {advice}.",
        workloads=tuple(seen),
        figures=tuple(figures),
    )


def _waits(names: Mapping[str, Sequence[Record]]) -> list[Wait]:
    """Of the fastest at each length, where kernel and wall time are known, shortest first."""
    fastest: dict[int, Wait] = {}
    for records in names.values():
        for record in exact(records):
            kernel, wall = (_clock(record, name) for name in ("kernel", "wall"))
            on_device = record.environment is not None and record.environment.device != "cpu"
            if kernel is None or wall is None or not on_device:
                continue
            n = length(record.workload)
            if n not in fastest or kernel < fastest[n].kernel_ns:
                fastest[n] = Wait(record, kernel, wall)
    return [fastest[n] for n in sorted(fastest)]


def _clock(record: Ok, name: str) -> float | None:
    if record.time is not None and record.time.clock == name:
        return record.time.median_ns
    return record.also[name].median_ns if name in record.also else None


def _length(wait: Wait) -> int:
    return length(wait.record.workload)


def _us(ns: float) -> str:
    return f"{ns / 1e3:.3g} us"
