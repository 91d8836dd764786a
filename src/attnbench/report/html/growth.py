"""How time and memory grow with length, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attnbench.analyse.families import Track, tracks
from attnbench.analyse.memory_limit import fits_until
from attnbench.analyse.scaling import (
    Fit,
    Regime,
    Slope,
    compute_bound,
    exponent,
    memory_points,
    time_points,
)
from attnbench.report.html.families import Families, kind_words
from attnbench.spec import Ok, Record

CEILINGS = {"always": "compute", "never": "memory"}
"""What sets the ceiling at all lengths of a track."""


def growth_rows(records: Iterable[Record], families: Families) -> list[dict[str, Any]]:
    """A row per implementation and track that was measured at two lengths or more."""
    rows: list[dict[str, Any]] = []
    for track, names in tracks(records).items():
        ceiling = _bound(compute_bound(record for members in names.values() for record in members))
        for name, members in names.items():
            time, memory = exponent(time_points(members)), exponent(memory_points(members))
            if time is not None or memory is not None:
                who = _identity(name, track, members, families)
                rows.append(who | _time(time, ceiling) | _memory(memory, members))
    return rows


def _identity(name: str, track: Track, records: Sequence[Record], families: Families) -> dict[str, Any]:
    """`words` is what the filter of shapes looks at, a line per shape."""
    shapes = [record.workload for record in records if isinstance(record, Ok)]
    return {
        "label": name,
        "framework": track.family.framework,
        "pass": track.family.pass_,
        "track": families.track(shapes[0]),
        "words": "\n".join(f"{w.id} {families.shape(w)} {kind_words(w)}" for w in shapes),
    }


def _time(fit: Fit | None, ceiling: str | None) -> dict[str, Any]:
    if fit is None:
        return {}
    return {
        "lengths": _lengths(fit),
        "time": fit.overall.exponent,
        **_interval("time", fit.overall),
        "time_theory": fit.overall.theory,
        "bound": ceiling,
    }


def _memory(fit: Fit | None, records: Sequence[Record]) -> dict[str, Any]:
    if fit is None:
        return {}
    limit = fits_until(records)
    return {
        "lengths": _lengths(fit),
        "memory": fit.overall.exponent,
        **_interval("memory", fit.overall),
        "memory_theory": fit.overall.theory,
        "memory_is": fit.growth,
        "fits": None if limit is None else limit.length,
    }


def _lengths(fit: Fit) -> str:
    return f"{fit.lengths[0]} to {fit.lengths[-1]}"


def _bound(regime: Regime | None) -> str | None:
    if regime is None:
        return None
    if regime.begins != "from":
        return CEILINGS[regime.begins]
    return f"compute, from somewhere between {regime.below:,} and {regime.length:,} tokens"


def _interval(name: str, slope: Slope) -> dict[str, Any]:
    low, high = slope.interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}
