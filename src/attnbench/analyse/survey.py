"""Runs -> what was measured where: per place, the candidates of each workload that were timed together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from attnbench.analyse.across_runs import CLEARLY, clearly_ahead
from attnbench.analyse.candidates import Refusal, eligible
from attnbench.analyse.clocks import clock_of, comparable
from attnbench.analyse.ranking import is_timed, label
from attnbench.analyse.ratios import condensed
from attnbench.analyse.settle import Field
from attnbench.analyse.twins import stands_in
from attnbench.policy import Constraints, Place, Shape, place_of, shape_of
from attnbench.spec import Environment, Ok, Record

CONTENDER = 1.5
"""So many times the fastest: nobody slower will lead after another measurement."""


class Source(Struct, frozen=True):
    """A run to choose from."""

    name: str
    created: str
    records: Sequence[Record]


class Ground(Struct, frozen=True):
    """What was measured at one place."""

    place: Place
    fields: dict[str, Field]
    """Workload id -> its candidates, all of one run."""

    @property
    def by_shape(self) -> dict[Shape, list[Field]]:
        """Workloads that one entry stands for, such as windows of several sizes."""
        found: dict[Shape, list[Field]] = {}
        for field in self.fields.values():
            workload = next(iter(field.values())).workload
            found.setdefault(shape_of(workload), []).append(field)
        return found


def survey(
    sources: Iterable[Source], constraints: Constraints, left_out: Mapping[str, str]
) -> tuple[list[Ground], list[Refusal]]:
    """The grounds, and the records that may not be chosen. `sources`: the oldest first."""
    grounds: dict[tuple[object, ...], Ground] = {}
    refused: list[Refusal] = []
    for source in sources:
        found, others = eligible(source.records, constraints, left_out)
        refused += others
        for (_, workload), records in _together(found).items():
            place = _place(records[0])
            key = next((one for one, ground in grounds.items() if ground.place.agrees(place)), place.key)
            ground = grounds.setdefault(key, Ground(place, {}))
            field = {label(record): record for record in records}
            if workload not in ground.fields or supersedes(field, ground.fields[workload]):
                ground.fields[workload] = field
            runs = tuple(dict.fromkeys((*ground.place.runs, source.name)))
            made = max(ground.place.made, source.created)
            software = dict(sorted((place.software | ground.place.software).items()))
            grounds[key] = Ground(structs.replace(ground.place, runs=runs, made=made, software=software), ground.fields)
    return list(grounds.values()), refused


def supersedes(new: Field, old: Field) -> bool:
    """Whether a newer measurement takes the place of an older: if it holds those that led there, or what is as fast by
    the same kernel; or if its own leader is clearly ahead of theirs, each held against what both runs have.

    Two that share nobody are held against each other in plain time; where that says nothing clear, the one with more
    candidates counts.
    """
    shared = [name for name in old if name in new]
    if not shared:
        return _replaces(new, old)
    held = all(
        name in new or any(stands_in(old[name], old[twin], new[twin]) for twin in shared) for name in contenders(old)
    )
    return held or clearly_ahead(_times(new), _times(old))


def _replaces(new: Field, old: Field) -> bool:
    """Of two fields without a common name: clearly faster on the same clock, else larger."""
    if _clock(new) == _clock(old):
        ahead = min(_times(old).values()) / min(_times(new).values())
        if not 1 / CLEARLY <= ahead <= CLEARLY:
            return ahead > 1
    return len(new) > len(old)


def _clock(field: Field) -> str:
    return clock_of(next(iter(field.values())))


def _times(field: Field) -> dict[str, float]:
    return {name: record.time.median_ns for name, record in field.items() if record.time is not None}


def contenders(field: Field) -> list[str]:
    """The fastest two, and whoever is within half as much again of the fastest; in order of time."""
    times = _times(field)
    order = sorted(times, key=lambda name: (times[name], name))
    return [name for n, name in enumerate(order) if n < 2 or times[name] <= CONTENDER * times[order[0]]]


def _together(records: Iterable[Ok]) -> dict[tuple[tuple[object, ...], str], list[Ok]]:
    """(place, workload id) -> records of one run, by one clock."""
    groups: dict[tuple[tuple[object, ...], str], dict[str, Ok]] = {}
    for record in records:
        groups.setdefault((_place(record).key, record.workload.id), {})[record.cell.id] = record
    return {
        key: [one for one in map(condensed, comparable(group.values())) if is_timed(one)]
        for key, group in groups.items()
    }


def _place(record: Ok) -> Place:
    environment = record.environment
    assert environment is not None
    return place_of(_with_framework(environment, record.implementation))


def _with_framework(environment: Environment, implementation: str) -> Environment:
    return structs.replace(environment, framework=environment.framework or implementation.partition(".")[0])
