"""The documents beside a report: performance, memory and correctness of each cell, and the growth, crossovers and
advice that follow from the cells of one machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, structs

from attnbench.measuring.rates import host_limit, notes_of
from attnbench.results.advice import Recommendation
from attnbench.results.by_length import crossover
from attnbench.results.families import Track, tracks
from attnbench.results.growth import compute_bound, exponent, fits_until, memory_points, time_points
from attnbench.results.recommend import compared_families, compared_tracks
from attnbench.results.records import baseline, label
from attnbench.results.sentences import speedups
from attnbench.results.standings import Standings
from attnbench.spec import Ok, Record

SCHEMA = 1
CHANGING = ("from", "until", "mixed")
"""Kinds of crossovers in which both sides are significantly faster somewhere."""
Document = dict[str, Any]


class Measured(Struct, frozen=True):
    """The standings of one machine with one set of packages, and the sentences about them."""

    title: str
    standings: Standings
    answer: Sequence[str]
    """Sentences of the answer, without those about wrong results."""
    advice: Sequence[Recommendation]

    @property
    def records(self) -> list[Record]:
        """The record of each cell that is shown."""
        return self.standings.records

    @property
    def baseline(self) -> str | None:
        """Name of the implementation that speed-ups are against."""
        return baseline(self.records, self.standings.against)

    def named(self, rows: Iterable[Document]) -> list[Document]:
        """Return rows of a document, each with the title of this part."""
        return [row | {"section": self.title} for row in rows]


def performance(parts: Sequence[Measured]) -> Document:
    """Return times, rates, speed-ups with their categories, growth with length, crossovers and advice."""
    bases = {part.baseline for part in parts}
    return _document(parts) | {
        "baseline": bases.pop() if len(bases) == 1 else None,
        "cells": [
            row for part in parts for row in part.named(_cell(r) | _speed(r) for r in part.records if isinstance(r, Ok))
        ],
        "speedups": [row for part in parts for row in part.named(_speedups(part))],
        "scaling": [row for part in parts for row in part.named(_time_growth(part.records))],
        "crossovers": [row for part in parts for row in part.named(_crossovers(part))],
        "recommendations": [row for part in parts for row in part.named(map(structs.asdict, part.advice))],
    }


def memory(parts: Sequence[Measured]) -> Document:
    """Return peaks with theory, their growth, and the length at which each implementation runs out of memory."""
    return _document(parts) | {
        "cells": [
            row
            for part in parts
            for row in part.named(_cell(r) | {"memory": r.memory, "reason": r.reason} for r in part.records)
        ],
        "growth": [row for part in parts for row in part.named(_memory_growth(part.records))],
    }


def correctness(parts: Sequence[Measured]) -> Document:
    """Return the checks of every cell with their errors, and the reasons of those that did not pass."""
    return _document(parts) | {
        "statuses": Counter(record.status for part in parts for record in part.records),
        "cells": [row for part in parts for row in part.named(map(_checked, part.records))],
    }


def _document(parts: Sequence[Measured]) -> Document:
    return {"schema": SCHEMA, "sections": [{"title": part.title, "baseline": part.baseline} for part in parts]}


def _speedups(part: Measured) -> list[Document]:
    base = part.baseline
    together = (one for key in part.standings.overall for one in part.standings.apart(key))
    return [structs.asdict(found) for one in together if base is not None for found in speedups(one, base)]


def _time_growth(records: Sequence[Record]) -> list[Document]:
    found = []
    for track, names in tracks(records).items():
        ceiling = compute_bound(record for members in names.values() for record in members)
        for name, members in names.items():
            fit = exponent(time_points(members))
            if fit is not None:
                found.append(_line(track, name) | {"time": fit, "compute_bound": ceiling})
    return found


def _memory_growth(records: Sequence[Record]) -> list[Document]:
    found = []
    for track, names in tracks(records).items():
        for name, members in names.items():
            fit = exponent(memory_points(members))
            if fit is not None:
                classes = {"growth": fit.growth, "growth_in_theory": fit.growth_in_theory}
                found.append(_line(track, name) | {"memory": fit, **classes, "fits_until": fits_until(members)})
    return found


def _crossovers(part: Measured) -> list[Document]:
    """Return the crossover of every implementation that changes places with the baseline along a track."""
    found, base = [], part.baseline
    for track, names in compared_tracks(compared_families(part.standings)).items():
        for name, records in names.items():
            if base is None or name == base or base not in names:
                continue
            place = crossover(records, names[base])
            if place is not None and place.kind in CHANGING:
                told = structs.replace(place, length=place.point)
                found.append(_line(track, name) | {"against": base, "crossover": told})
    return found


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


def _checked(record: Record) -> Document:
    return _cell(record) | {
        "reason": record.reason,
        "errors": record.errors,
        "verified_at": record.verified_at,
        "deterministic": record.deterministic,
        "approximate": record.approximate if isinstance(record, Ok) else None,
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


def _line(track: Track, name: str) -> Document:
    family = track.family
    return {"implementation": name, "family": family.title, "track": track.title, "device": family.device}
