"""Rows that are not cells: frameworks side by side, KV cache, kernels, growth with length, reasons, ceilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from attnbench.report.html.cells import Cells, short
from attnbench.report.html.sections import ShapeNames, kind_words
from attnbench.results.families import Track, tracks
from attnbench.results.growth import Fit, compute_bound, exponent, fits_until, memory_points, time_points
from attnbench.results.records import framework_of, is_timed, label
from attnbench.results.sentences import CANNOT_TELL, category, counted, format_ratio
from attnbench.spec import Cost, Ok, Record

Rows = list[dict[str, Any]]
SIDES = {1: "torch", -1: "JAX", 0: "too close to call"}
"""Sign of a ratio -> the faster framework."""
MOST_KERNELS = 12
MOST_NAMES = 8
LONGEST_REASON = 400
SHORT_REASON = 200
MOST_REASONS = 3
CEILINGS = {"always": "compute", "never": "memory"}
"""Regime -> limit that sets the ceiling at all lengths of a track."""


def side_by_side(cells: Cells) -> Rows:
    """Return a row for every shape on which the winner of torch and that of JAX took turns."""
    torch, jax = (cells.standings.frameworks.get(name, {}) for name in ("torch", "jax"))
    rows: Rows = []
    for key in (key for key in torch if key in jax):
        ours, theirs = torch[key].first, jax[key].first
        both = cells.standings.together(key, ours, theirs) if ours is not None and theirs is not None else None
        if both is None or ours is None or theirs is None:
            continue
        ratio = both.ratio(ours, theirs)
        rows.append(
            _shape(both.ranked[ours], cells.names)
            | {
                "torch": ours,
                "torch_ns": both.times[ours],
                "jax": theirs,
                "jax_ns": both.times[theirs],
                "gain": ratio.value,
                "gain_low": ratio.low,
                "gain_high": ratio.high,
                "gain_text": format_ratio(ratio),
                "side": CANNOT_TELL if category(ratio) == CANNOT_TELL else SIDES[ratio.sign],
            }
        )
    return rows


def _shape(record: Record, names: ShapeNames) -> dict[str, Any]:
    workload = record.workload
    return {
        "shape": names.shape(workload),
        "workload": workload.id,
        "kind": kind_words(workload),
        "pass": workload.pass_,
    }


def kv_cache(cells: Cells) -> Rows:
    """Return the bytes of a cache of keys and values at each shape; they do not depend on an implementation."""
    rows: dict[str, dict[str, Any]] = {}
    for record in cells.records:
        if isinstance(record, Ok) and record.memory.kv_cache_bytes:
            workload = record.workload
            rows[workload.id] = _shape(record, cells.names) | {
                "cache": record.memory.kv_cache_bytes,
                "per_token": round(record.memory.kv_cache_bytes / (workload.batch * workload.kv_len)),
                "scores": record.memory.scores_bytes or None,
            }
    return list(rows.values())


def kernels(cells: Cells) -> Rows:
    """Return the kernels that each cell launched; the page joins shapes that launched the same."""
    return [
        {"label": label(record), "framework": framework_of(record)}
        | _shape(record, cells.names)
        | {"kernels": "\n".join(_capped([*map(short, record.kernels)], MOST_KERNELS))}
        for record in cells.records
        if isinstance(record, Ok) and record.kernels
    ]


def why_nothing(records: Iterable[Record]) -> str:
    """Return the reasons that most cells without a result have."""
    reasons = Counter(record.reason for record in records if not isinstance(record, Ok))
    told = [
        f"{' '.join(reason.split())[:SHORT_REASON].rstrip('.')} ({counted(count, 'cell')})"
        for reason, count in reasons.most_common(MOST_REASONS)
    ]
    return "Nothing was timed." + (f" The reasons given most often: {'; '.join(told)}." if told else "")


def not_run(records: Iterable[Record], names: ShapeNames) -> Rows:
    """Return a row per reason for the cells without a result."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if not isinstance(record, Ok):
            groups.setdefault((record.status, record.reason), []).append(record)
    return [
        {
            "status": status.replace("_", " "),
            "cells": len(group),
            "labels": ", ".join(_capped(list(dict.fromkeys(map(label, group))), MOST_NAMES)),
            "reason": reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 1]}…",
            "where": names.shape(group[0].workload),
        }
        for (status, reason), group in groups.items()
    ]


def _capped(names: Sequence[str], most: int) -> list[str]:
    left = len(names) - most
    return list(names) if left <= 0 else [*names[:most], f"and {left} more"]


def roofs(cells: Cells) -> Rows:
    """Return the measured ceilings as lines, worked out from the shares that were reached under them."""
    points: dict[str, list[Cost]] = {}
    for record in (record for run in cells.standings.runs for record in run):
        if is_timed(record) and record.cost.roofline and record.cost.bytes:
            points.setdefault(f"{framework_of(record)}, {record.workload.dtype}", []).append(record.cost)
    reached = [cost.flops / cost.bytes for costs in points.values() for cost in costs]
    return [
        point
        for name, costs in points.items()
        for point in _roof(name, _ceiling(costs, "compute"), _ceiling(costs, "memory"), min(reached), max(reached))
    ]


def _ceiling(costs: Iterable[Cost], bound: str) -> float | None:
    """Return TFLOP/s or GB/s of a ceiling; None if nothing was bound by it."""
    rates = [
        rate / cost.roofline
        for cost in costs
        if cost.bound == bound and cost.roofline and (rate := cost.tflops if bound == "compute" else cost.gb_per_s)
    ]
    return median(rates) if rates else None


def _roof(name: str, tflops: float | None, gb_per_s: float | None, least: float, most: float) -> Rows:
    """Return the points of one roof, which rises with the memory ceiling until the compute ceiling binds."""
    ends = [least, most]
    if tflops and gb_per_s and least < 1e3 * tflops / gb_per_s < most:
        ends.insert(1, 1e3 * tflops / gb_per_s)
    rows: Rows = []
    for x in ends:
        limits = [limit for limit in (tflops, gb_per_s and gb_per_s * x / 1e3) if limit]
        if limits:
            rows.append({"roof": name, "intensity": round(x, 3), "tflops": round(min(limits), 4)})
    return rows


def growth_rows(records: Iterable[Record], names: ShapeNames) -> Rows:
    """Return a row per implementation and track that was measured at two lengths or more."""
    rows: Rows = []
    for track, members in tracks(records).items():
        ceiling = _ceiling_words(record for mine in members.values() for record in mine)
        for name, mine in members.items():
            time, memory = exponent(time_points(mine)), exponent(memory_points(mine))
            row = _track_row(name, track, mine, names)
            if time is not None:
                row |= _fit_fields("time", time) | {"bound": ceiling}
            if memory is not None:
                limit = fits_until(mine)
                fits = None if limit is None else limit.length
                row |= _fit_fields("memory", memory) | {"memory_is": memory.growth, "fits": fits}
            if time is not None or memory is not None:
                rows.append(row)
    return rows


def _track_row(name: str, track: Track, records: Sequence[Record], names: ShapeNames) -> dict[str, Any]:
    """Return the fields that the filters look at: `words` has a line for each shape."""
    shapes = [record.workload for record in records if isinstance(record, Ok)]
    return {
        "label": name,
        "framework": track.family.framework,
        "pass": track.family.pass_,
        "track": names.track(shapes[0]) if shapes else "",
        "words": "\n".join(f"{w.id} {names.shape(w)} {kind_words(w)}" for w in shapes),
    }


def _fit_fields(name: str, fit: Fit) -> dict[str, Any]:
    low, high = fit.overall.interval or (None, None)
    return {
        "lengths": f"{fit.lengths[0]} to {fit.lengths[-1]}",
        name: fit.overall.exponent,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_theory": fit.overall.theory,
    }


def _ceiling_words(records: Iterable[Record]) -> str | None:
    regime = compute_bound(records)
    if regime is None:
        return None
    if regime.begins != "from":
        return CEILINGS[regime.begins]
    return f"compute, from somewhere between {regime.below:,} and {regime.length:,} tokens"
