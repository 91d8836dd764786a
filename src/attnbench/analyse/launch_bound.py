"""Tracks -> up to which length a GPU waits for its host, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from attnbench.analyse.advice import Figure, Recommendation, listed
from attnbench.analyse.families import Family, Track, length
from attnbench.measuring.rates import CallTime, call_time
from attnbench.results.records import exact, label
from attnbench.spec import Ok, Record

ADVICE = {"jax": "put the whole step under one jax.jit, so that XLA can launch it as a CUDA graph"}
"""By framework; any other captures a graph itself."""
CAPTURE = "capture a CUDA graph"


class Wait(Struct, frozen=True):
    """Time of the kernels and of the whole call, of the fastest implementation at one length."""

    record: Ok
    call: CallTime

    @property
    def told(self) -> str:
        """Who waits how long for what."""
        by = "" if self.call.clock == "wall" else f" by {self.call.clock}"
        return f"{label(self.record)}: {_time(self.call.kernel_ns)} of kernels in {_time(self.call.call_ns)}{by}"


def launch_bound_of(family: Family, tracks: Mapping[Track, Mapping[str, Sequence[Record]]]) -> Recommendation | None:
    """One sentence for all batches of a family; None where both clocks were not read or nothing waits."""
    told, figures, seen = [], [], []
    for track, names in tracks.items():
        waits = _waits(names)
        bound = [wait for wait in waits if wait.call.bound]
        if not bound:
            continue
        longest = bound[-1]
        beyond = [wait for wait in waits if _length(wait) > _length(longest)]
        no_longer = f"; no longer at {_length(beyond[0]):,}" if beyond else ""
        told.append(f"{track.title} {_reach(bound, waits)} tokens ({longest.told}{no_longer})")
        call = longest.call
        for name, value in (("kernel", call.kernel_ns), (call.clock, call.call_ns)):
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


def _reach(bound: Sequence[Wait], waits: Sequence[Wait]) -> str:
    """up to 512, where every shorter one is bound too."""
    lengths = [f"{_length(wait):,}" for wait in bound]
    if len(bound) > 1 and list(bound) == list(waits[: len(bound)]):
        return f"up to {lengths[-1]}"
    return f"at {listed(lengths)}"


def _waits(names: Mapping[str, Sequence[Record]]) -> list[Wait]:
    """Of the fastest at each length, where the time of its kernels and of the whole call are known, shortest first."""
    fastest: dict[int, Ok] = {}
    for record in (record for records in names.values() for record in exact(records)):
        n = length(record.workload)
        on_device = record.environment is not None and record.environment.device != "cpu"
        if on_device and call_time(record) is not None and (n not in fastest or _ns(record) < _ns(fastest[n])):
            fastest[n] = record
    return [Wait(fastest[n], call) for n in sorted(fastest) if (call := call_time(fastest[n])) is not None]


def _ns(record: Ok) -> float:
    assert record.time is not None
    return record.time.median_ns


def _length(wait: Wait) -> int:
    return length(wait.record.workload)


def _time(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms" if ns >= 1e6 else f"{ns / 1e3:.3g} us"
