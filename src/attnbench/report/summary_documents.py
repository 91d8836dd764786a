"""Records -> the documents beside a report (performance, memory, correctness): each cell, and what follows from all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from attnbench.analyse.advice import Recommendation
from attnbench.analyse.crossover import crossover
from attnbench.analyse.families import Track, Tracks
from attnbench.analyse.memory_limit import fits_until
from attnbench.analyse.ranking import ANCHOR, baseline, label
from attnbench.analyse.scaling import compute_bound, exponent, memory_points, time_points
from attnbench.analyse.speedup import speedups
from attnbench.spec import Ok, Record

SCHEMA = 1
Document = dict[str, Any]


def performance(
    records: Sequence[Record], lines: Tracks, advice: Sequence[Recommendation], against: Sequence[str] = ()
) -> Document:
    """Times, rates, speed-ups with their categories, growth with length, crossovers with the baseline, advice; `lines`
    are the tracks of the records."""
    base = baseline(records, against)
    return {
        "schema": SCHEMA,
        "baseline": base,
        "cells": [_cell(r) | _speed(r) for r in _measured(records)],
        "speedups": [] if base is None else speedups(records, base),
        "scaling": [one for track, names in lines.items() for one in _growth(track, names)],
        "crossovers": [] if base is None else _crossovers(lines, base),
        "recommendations": advice,
    }


def memory(records: Sequence[Record], lines: Tracks) -> Document:
    """Peaks with theory, how they grow, and the length at which each implementation stops fitting."""
    return {
        "schema": SCHEMA,
        "cells": [_cell(r) | {"memory": r.memory, "reason": r.reason} for r in _without_anchors(records)],
        "growth": [one for track, names in lines.items() for one in _memory_growth(track, names)],
    }


def correctness(records: Sequence[Record]) -> Document:
    """What was checked, where, and how far each was off; what did not pass, with the reason."""
    shown = _without_anchors(records)
    return {
        "schema": SCHEMA,
        "statuses": Counter(record.status for record in shown),
        "cells": [
            _cell(r)
            | {
                "reason": r.reason,
                "errors": r.errors,
                "verified_at": r.verified_at,
                "deterministic": r.deterministic,
                "approximate": r.approximate if isinstance(r, Ok) else None,
            }
            for r in shown
        ],
    }


def _without_anchors(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record.implementation.startswith(ANCHOR)]


def _measured(records: Sequence[Record]) -> list[Ok]:
    return [record for record in _without_anchors(records) if isinstance(record, Ok)]


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
        "notes": record.notes,
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


def _crossovers(lines: Tracks, base: str) -> list[Document]:
    """Of every implementation with the baseline, where one is not ahead at all lengths."""
    found = []
    for track, names in lines.items():
        for name, records in names.items():
            if name == base or base not in names or not _change_sides(records, names[base]):
                continue
            place = crossover(records, names[base])
            told = None if place is None else replace(place, length=place.point)
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
