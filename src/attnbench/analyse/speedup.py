"""How much faster than a chosen baseline, in words that a table can be coloured by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from attnbench.results.ratios import RANK_LEVEL, Ratio, paired_ratio
from attnbench.results.records import by_workload, clock_of, is_timed, label, on_one_clock
from attnbench.spec import Ok, Record

Category = Literal["excellent", "good", "measured", "investigate", "no significant difference", "cannot tell"]
EXCELLENT, GOOD = 1.5, 1.2


class Speedup(Struct, frozen=True, kw_only=True):
    """One implementation against the baseline on one workload."""

    implementation: str
    workload: str
    baseline: str
    device: str
    ratio: Ratio
    """Time of the baseline / time of this one, with the interval that the category goes by: the ranking's."""
    category: Category
    approximate: bool = False


def category(ratio: Ratio) -> Category:
    """Of a time of the baseline over a time of this one: what is certain, so a gain goes by its low edge.

    An interval around 1 that reaches a good gain, or as large a loss, says nothing: more rounds would.
    """
    if ratio.low <= 1 <= ratio.high:
        return "no significant difference" if ratio.low > 1 / GOOD and ratio.high < GOOD else "cannot tell"
    if ratio.high < 1:
        return "investigate"
    return "excellent" if ratio.low > EXCELLENT else "good" if ratio.low >= GOOD else "measured"


def speedups(records: Iterable[Record], base: str) -> list[Speedup]:
    """Every timed record against the baseline's of the same workload, device and clock, where there is one."""
    devices: dict[str, dict[str, Record]] = {}
    for record in records:
        device = "" if record.environment is None else record.environment.device_name
        devices.setdefault(device, {})[record.cell.id] = record
    found: list[Speedup] = []
    for device, members in devices.items():
        for group in by_workload(members.values()).values():
            timed = [record for record in on_one_clock(group) if is_timed(record)]
            reference = next((record for record in timed if label(record) == base), None)
            if reference is not None:
                others = [
                    record for record in timed if record is not reference and clock_of(record) == clock_of(reference)
                ]
                found += [_speedup(record, reference, base, device) for record in others]
    return found


def _speedup(record: Ok, reference: Ok, base: str, device: str) -> Speedup:
    ratio = paired_ratio(record, reference, RANK_LEVEL)
    return Speedup(
        implementation=label(record),
        workload=record.workload.id,
        baseline=base,
        device=device,
        ratio=ratio,
        category=category(ratio),
        approximate=record.approximate,
    )
