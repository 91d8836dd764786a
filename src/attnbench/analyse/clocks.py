"""Records of one workload -> those that may be compared: a time by events over a time of kernels is no ratio, nor is a
time of today over one of yesterday."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import structs

from attnbench.spec import Ok, Record


def on_one_clock(records: Iterable[Record]) -> list[Record]:
    """Where several clocks were published, all by the clock that most of them hold, published or beside it; of several
    such the one most published. What does not hold it stays as it is."""
    kept = list(records)
    published = Counter(map(clock_of, kept))
    published.pop("", None)
    if len(published) < 2:
        return kept
    held = Counter(name for record in kept for name in _clocks(record))
    clock = max(sorted(held), key=lambda name: (held[name], published[name]))
    return [_by(record, clock) for record in kept]


def comparable(records: Iterable[Record]) -> list[Record]:
    """By one clock and of one sitting, without the timed ones of others: of those that most were timed by and in, of
    several such sittings the last."""
    kept = on_one_clock(records)
    counts = Counter(map(clock_of, kept))
    counts.pop("", None)
    clock = max(counts, key=lambda name: counts[name], default="")
    sittings = Counter(sitting_of(record) for record in kept if clock and clock_of(record) == clock)
    sitting = max(sittings, key=lambda name: (sittings[name], name), default="")
    return [
        record for record in kept
        if not clock_of(record) or (clock_of(record), sitting_of(record)) == (clock, sitting)
    ]  # fmt: skip


def sitting_of(record: Record) -> str:
    """Empty where nothing was timed, or by an attnbench that did not write it."""
    return record.time.sitting.partition("+")[0] if isinstance(record, Ok) and record.time is not None else ""


def clock_of(record: Record) -> str:
    """The clock that was published; empty where nothing was timed."""
    return record.time.clock if isinstance(record, Ok) and record.time is not None else ""


def _clocks(record: Record) -> set[str]:
    if not isinstance(record, Ok) or record.time is None:
        return set()
    return {record.time.clock, *(name for name, time in record.also.items() if time.clock == name)}


def _by(record: Record, clock: str) -> Record:
    """With that clock's time for its own, and the rates that follow from it."""
    if not isinstance(record, Ok) or record.time is None or record.time.clock == clock or clock not in _clocks(record):
        return record
    old, new = record.time, structs.replace(record.also[clock], sitting=record.time.sitting)
    factor = old.median_ns / new.median_ns
    rates = {name: rate * factor for name in ("tflops", "gb_per_s", "roofline") if (rate := getattr(record.cost, name))}
    throughput = record.throughput
    if throughput is not None:
        faster = {name: getattr(throughput, name) * factor for name in throughput.__struct_fields__}
        throughput = structs.replace(throughput, **faster)
    also = {name: time for name, time in record.also.items() if name != clock} | {old.clock: old}
    cost = structs.replace(record.cost, **rates)
    return structs.replace(record, time=new, also=also, cost=cost, throughput=throughput)
