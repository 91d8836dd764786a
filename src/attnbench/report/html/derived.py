"""Rows that are not cells: frameworks side by side, KV cache, kernels, what did not run, ceilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from attnbench.analyse.speedup import category
from attnbench.analyse.wording import CANNOT_TELL, counted
from attnbench.report.html.cells import Cells, short
from attnbench.report.html.families import Families, kind_words
from attnbench.results.records import framework_of, is_timed, label
from attnbench.results.standings import Standing
from attnbench.spec import Cost, Ok, Record

Rows = list[dict[str, Any]]
SIDES = {1: "torch", -1: "JAX", 0: "too close to call"}
"""Who is faster for certain."""
MOST_KERNELS = 12
MOST_NAMES = 8
LONGEST_REASON = 400
SHORT_REASON = 200
MOST_REASONS = 3


def side_by_side(cells: Cells) -> Rows:
    """Return a row for every shape on which the winner of torch and that of JAX took turns: by the newest such run."""
    torch, jax = (cells.standings.frameworks.get(name, {}) for name in ("torch", "jax"))
    rows: Rows = []
    for key in (key for key in torch if key in jax):
        ours, theirs = torch[key].first, jax[key].first
        runs = (run[key] for run in reversed(cells.standings.by_run) if key in run)
        both = next((one for one in runs if ours in one.ranked and theirs in one.ranked), None)
        if both is not None and ours is not None and theirs is not None:
            rows.append(_beside(both, ours, theirs, cells.families))
    return rows


def _beside(standing: Standing, torch: str, jax: str, families: Families) -> dict[str, Any]:
    ratio = standing.ratio(torch, jax)
    return _shape(standing.ranked[torch], families) | {
        "torch": torch,
        "torch_ns": standing.times[torch],
        "jax": jax,
        "jax_ns": standing.times[jax],
        "gain": ratio.value,
        "gain_low": ratio.low,
        "gain_high": ratio.high,
        "side": CANNOT_TELL if category(ratio) == CANNOT_TELL else SIDES[ratio.sign],
    }


def _shape(record: Record, families: Families) -> dict[str, Any]:
    workload = record.workload
    return {
        "shape": families.shape(workload),
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
            rows[workload.id] = _shape(record, cells.families) | {
                "cache": record.memory.kv_cache_bytes,
                "per_token": round(record.memory.kv_cache_bytes / (workload.batch * workload.kv_len)),
                "scores": record.memory.scores_bytes or None,
            }
    return list(rows.values())


def kernels(cells: Cells) -> Rows:
    """Return the kernels that each cell launched; the page joins shapes that launched the same."""
    return [
        {"label": label(record), "framework": framework_of(record)}
        | _shape(record, cells.families)
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


def not_run(records: Iterable[Record], families: Families) -> Rows:
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
            "where": families.shape(group[0].workload),
        }
        for (status, reason), group in groups.items()
    ]


def _capped(names: Sequence[str], most: int) -> list[str]:
    left = len(names) - most
    return list(names) if left <= 0 else [*names[:most], f"and {left} more"]


def roofs(cells: Cells) -> Rows:
    """The measured ceilings as lines, read back from the shares that were reached under them."""
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
    """TFLOP/s or GB/s of the ceiling; None where nothing was bound by it."""
    rates = [
        rate / cost.roofline
        for cost in costs
        if cost.bound == bound and cost.roofline and (rate := cost.tflops if bound == "compute" else cost.gb_per_s)
    ]
    return median(rates) if rates else None


def _roof(name: str, tflops: float | None, gb_per_s: float | None, least: float, most: float) -> Rows:
    """Rising with the memory ceiling, level from where the compute ceiling binds."""
    ends = [least, most]
    if tflops and gb_per_s and least < 1e3 * tflops / gb_per_s < most:
        ends.insert(1, 1e3 * tflops / gb_per_s)
    rows: Rows = []
    for x in ends:
        limits = [limit for limit in (tflops, gb_per_s and gb_per_s * x / 1e3) if limit]
        if limits:
            rows.append({"roof": name, "intensity": round(x, 3), "tflops": round(min(limits), 4)})
    return rows
