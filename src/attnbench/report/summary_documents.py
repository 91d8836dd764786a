"""What was measured, place by place -> the documents beside a report (performance, memory, correctness): each cell, and
what follows from those of its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, structs

from attnbench.analyse.advice import Recommendation
from attnbench.analyse.crossover import crossover
from attnbench.analyse.families import Track, tracks, tracks_of
from attnbench.analyse.memory_limit import fits_until
from attnbench.analyse.recommend import compared_families
from attnbench.analyse.scaling import compute_bound, exponent, memory_points, time_points
from attnbench.analyse.speedup import speedups
from attnbench.measuring.rates import host_limit, notes_of
from attnbench.results.records import baseline, label
from attnbench.results.standings import Standings
from attnbench.spec import Ok, Record

SCHEMA = 1
Document = dict[str, Any]


class Measured(Struct, frozen=True):
    """What was measured in one place with one set of packages, and what is said of it."""

    title: str
    standings: Standings
    answer: Sequence[str]
    """Sentences; what is wrong is told without them."""
    advice: Sequence[Recommendation]

    @property
    def records(self) -> list[Record]:
        """The record of each cell that is shown."""
        return self.standings.records

    @property
    def baseline(self) -> str | None:
        """Name of what its speed-ups are against."""
        return baseline(self.records, self.standings.against)

    def named(self, rows: Iterable[Document]) -> list[Document]:
        """Rows of a document, each with the place it is from."""
        return [row | {"section": self.title} for row in rows]


def performance(parts: Sequence[Measured]) -> Document:
    """Times, rates, speed-ups with their categories, growth with length, crossovers with the baseline, advice."""
    bases = {part.baseline for part in parts}
    return _document(parts) | {
        "baseline": bases.pop() if len(bases) == 1 else None,
        "cells": [row for one in parts for row in one.named(_cell(r) | _speed(r) for r in _measured(one.records))],
        "speedups": [row for part in parts for row in part.named(_speedups(part))],
        "scaling": [row for part in parts for row in part.named(_growths(part.records))],
        "crossovers": [row for part in parts for row in part.named(_crossovers(part))],
        "recommendations": [row for part in parts for row in part.named(map(structs.asdict, part.advice))],
    }


def memory(parts: Sequence[Measured]) -> Document:
    """Peaks with theory, how they grow, and the length at which each implementation stops fitting."""
    return _document(parts) | {
        "cells": [
            row
            for part in parts
            for row in part.named(_cell(r) | {"memory": r.memory, "reason": r.reason} for r in part.records)
        ],
        "growth": [row for part in parts for row in part.named(_memory_growths(part.records))],
    }


def correctness(parts: Sequence[Measured]) -> Document:
    """What was checked, where, and how far each was off; what did not pass, with the reason."""
    return _document(parts) | {
        "statuses": Counter(record.status for part in parts for record in part.records),
        "cells": [row for part in parts for row in part.named(map(_checked, part.records))],
    }


def _document(parts: Sequence[Measured]) -> Document:
    return {"schema": SCHEMA, "sections": [{"title": part.title, "baseline": part.baseline} for part in parts]}


def _checked(record: Record) -> Document:
    return _cell(record) | {
        "reason": record.reason,
        "errors": record.errors,
        "verified_at": record.verified_at,
        "deterministic": record.deterministic,
        "approximate": record.approximate if isinstance(record, Ok) else None,
    }


def _measured(records: Sequence[Record]) -> list[Ok]:
    return [record for record in records if isinstance(record, Ok)]


def _speedups(part: Measured) -> list[Document]:
    base = part.baseline
    together = (one for key in part.standings.overall for one in part.standings.apart(key))
    return [structs.asdict(s) for one in together for s in (speedups(one.compared, base) if base is not None else ())]


def _growths(records: Sequence[Record]) -> list[Document]:
    return [one for track, names in tracks(records).items() for one in _growth(track, names)]


def _memory_growths(records: Sequence[Record]) -> list[Document]:
    return [one for track, names in tracks(records).items() for one in _memory_growth(track, names)]


def _cell(record: Record) -> Document:
    environment = record.environment
    return {
        "implementation": label(record),
        "workload": record.workload.id,
        "axes": record.workload.axes,
        "status": record.status,
        "device": None if environment is None else environment.device_name,
        "fingerprint": None if environment is None else environment.fingerprint,
    }


def _speed(record: Ok) -> Document:
    time = record.time
    names = [] if time is None else [name for name in time.__struct_fields__ if name not in ("samples_ns", "rounds")]
    return {
        "time": None if time is None else {name: getattr(time, name) for name in names},
        "also": {name: one.median_ns for name, one in record.also.items()},
        "compile_ns": record.compile_ns,
        "throughput": record.throughput,
        "cost": record.cost,
        "kernels": record.kernels,
        "notes": notes_of(record),
        "host_limited": host_limit(record),
    }


def _growth(track: Track, names: dict[str, list[Record]]) -> list[Document]:
    found = []
    ceiling = compute_bound(record for records in names.values() for record in records)
    for name, records in names.items():
        fit = exponent(time_points(records))
        if fit is not None:
            found.append(_line(track, name) | {"time": fit, "compute_bound": ceiling})
    return found


def _memory_growth(track: Track, names: dict[str, list[Record]]) -> list[Document]:
    found = []
    for name, records in names.items():
        fit = exponent(memory_points(records))
        if fit is not None:
            classes = {"growth": fit.growth, "growth_in_theory": fit.growth_in_theory}
            found.append(_line(track, name) | {"memory": fit, **classes, "fits_until": fits_until(records)})
    return found


def _crossovers(part: Measured) -> list[Document]:
    """Of every implementation with the baseline, where one is not ahead at all lengths."""
    found, base = [], part.baseline
    families = compared_families(part.standings)
    compared = {family: [r for one in members.values() for r in one.compared] for family, members in families.items()}
    for track, names in tracks_of(compared).items():
        for name, records in names.items():
            if base is None or name == base or base not in names or not _change_sides(records, names[base]):
                continue
            place = crossover(records, names[base])
            told = None if place is None else structs.replace(place, length=place.point)
            found.append(_line(track, name) | {"against": base, "crossover": told})
    return found


def _change_sides(records: Sequence[Record], others: Sequence[Record]) -> bool:
    """Whether the medians alone show both ahead somewhere, which costs no resampling to see."""
    ours, theirs = ({p.length: p.value for p in time_points(one)} for one in (records, others))
    ahead = {ours[n] < theirs[n] for n in ours.keys() & theirs.keys()}
    return len(ahead) > 1


def _line(track: Track, name: str) -> Document:
    family = track.family
    return {"implementation": name, "family": family.title, "track": track.title, "device": family.device}
