"""Records of several runs -> those that may be compared: rounds are paired within a run only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from attnbench.analyse.across_runs import clearly_ahead
from attnbench.analyse.clocks import comparable
from attnbench.analyse.families import OVERALL, Family, by_family, family_of
from attnbench.analyse.ranking import by_workload, is_timed, label
from attnbench.spec import Ok, Record

Runs = Iterable[Iterable[Record]]
"""The oldest first."""


def newest(runs: Runs) -> list[Record]:
    """Of each cell the newest: to be shown, not to be compared."""
    return list({record.cell.id: record for run in runs for record in run}.values())


def timed_together(runs: Runs) -> list[Ok]:
    """Of each workload the timed records of one run, by one clock: of the run with most of them, the newest of such,
    unless what is fastest in another is clearly ahead of it."""
    found: dict[str, list[list[Ok]]] = {}
    for run in runs:
        for key, group in by_workload({record.cell.id: record for record in run}.values()).items():
            timed = [record for record in comparable(filter(is_timed, group)) if is_timed(record)]
            if timed:
                found.setdefault(key, []).append(timed)
    return [record for groups in found.values() for record in _deciding(groups)]


def _deciding(groups: Sequence[list[Ok]]) -> list[Ok]:
    best = max(reversed(groups), key=len)
    for other in reversed(groups):
        if other is not best and clearly_ahead(_times(other), _times(best)):
            best = other
    return best


def _times(records: Iterable[Ok]) -> dict[str, float]:
    """Of what may be recommended."""
    return {label(one): one.time.median_ns for one in records if one.time is not None and not one.approximate}


def across_frameworks(runs: Runs) -> dict[Family, list[Record]]:
    """The same of every kind of shapes that several frameworks timed in one run, all of them together."""
    found: dict[Family, list[list[Record]]] = {}
    for run in runs:
        kinds: dict[Family, list[Record]] = {}
        for family, members in by_family(run).items():
            kinds.setdefault(structs.replace(family, framework=OVERALL), []).extend(members)
        for kind, members in kinds.items():
            found.setdefault(kind, []).append(members)
    together = {kind: timed_together(members) for kind, members in found.items()}
    return {kind: shared for kind, members in together.items() if (shared := _shared(members))}


def _shared(records: list[Ok]) -> list[Record]:
    """Records of workloads that more than one framework ran."""
    groups = by_workload(records).values()
    return [record for group in groups if len({family_of(one).framework for one in group}) > 1 for record in group]


def families_together(runs: Runs) -> dict[Family, list[Record]]:
    """The same family by family, since each framework of a family may have had a run of its own."""
    found: dict[Family, list[list[Record]]] = {}
    for run in runs:
        for family, members in by_family(run).items():
            found.setdefault(family, []).append(members)
    return {family: list(timed_together(members)) for family, members in found.items()}
