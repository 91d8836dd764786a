"""Records of one implementation at several lengths, with times and peaks of known growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from record_factory import noisy, ok, timing, workload

from attnbench.spec import Cost, Environment, Memory, Ok, OutOfMemory, Record

LENGTHS = (256, 512, 1024, 2048, 4096)
GPU = Environment(device="cuda", device_name="Test GPU", framework="torch", memory_bytes=80 * 10**9)
Curve = Callable[[int], float]


def steady(median: float, seed: int) -> tuple[float, ...]:
    """Samples of a quiet machine: 1 % of noise, no drift."""
    return tuple(noisy(median, seed) / noisy(1.0, seed, spread=0.0))


def along(name: str, ns: Curve, lengths: Sequence[int] = LENGTHS, seed: int = 0, **fields: Any) -> list[Record]:
    """A record per length whose median is about `ns(length)`; `peak` is a curve of bytes, the rest goes to `ok`."""
    peak: Curve | None = fields.pop("peak", None)
    shape: dict[str, Any] = fields.pop("shape", {})
    also: dict[str, Curve] = fields.pop("also", {})
    clock: str = fields.pop("clock", "wall")
    records: list[Record] = []
    for index, n in enumerate(lengths):
        on = workload(n, **shape)
        made: dict[str, Any] = {
            "environment": GPU,
            "time": timing(steady(ns(n), 100 * seed + index), clock=clock),
            "cost": Cost(flops=n * n, bytes=n),
            "also": {clock: timing([curve(n)] * 3, clock=clock) for clock, curve in also.items()},
        }
        if peak is not None:
            made["memory"] = Memory(peak_bytes=int(peak(n)), theory_bytes=int(peak(n)))
        records.append(ok(name, on=on, **(made | fields)))
    return records


def out_of_memory(name: str, n: int, **shape: Any) -> OutOfMemory:
    return OutOfMemory(implementation=name, workload=workload(n, **shape), reason="did not fit", environment=GPU)


def timed(record: Record) -> Ok:
    assert isinstance(record, Ok)
    return record
