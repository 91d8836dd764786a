"""How time and memory grow with length, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnbench.analyse.families import Track, tracks
from attnbench.analyse.scaling import Fit, exponent, growth, memory_points, time_points
from attnbench.report.html.families import Families
from attnbench.spec import Record


def growth_rows(records: Iterable[Record], families: Families) -> list[dict[str, Any]]:
    """A row per implementation and track that was measured at two lengths or more."""
    rows: list[dict[str, Any]] = []
    for track, names in tracks(records).items():
        for name, members in names.items():
            time, memory = exponent(time_points(members)), exponent(memory_points(members))
            if time is not None or memory is not None:
                rows.append(_row(name, track, members[0], families) | _time(time) | _memory(memory))
    return rows


def _row(name: str, track: Track, record: Record, families: Families) -> dict[str, Any]:
    return {
        "label": name,
        "framework": track.family.framework,
        "pass": track.family.pass_,
        "track": families.track(record.workload),
    }


def _time(fit: Fit | None) -> dict[str, Any]:
    if fit is None:
        return {}
    return {"lengths": _lengths(fit), "time": fit.overall.exponent, "time_interval": _interval(fit)}


def _memory(fit: Fit | None) -> dict[str, Any]:
    if fit is None:
        return {}
    return {
        "lengths": _lengths(fit),
        "memory": fit.overall.exponent,
        "memory_theory": fit.overall.theory,
        "memory_is": growth(fit.local.exponent),
    }


def _lengths(fit: Fit) -> str:
    return f"{fit.lengths[0]} to {fit.lengths[-1]}"


def _interval(fit: Fit) -> str | None:
    interval = fit.overall.interval
    return None if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
