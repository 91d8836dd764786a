"""Rows that are not cells: frameworks side by side, KV cache, kernels, what did not run, ceilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from attnbench.analyse.ranking import RANK_LEVEL, Row, is_timed, label, sign
from attnbench.analyse.ratios import paired_ratio
from attnbench.analyse.speedup import category
from attnbench.analyse.wording import CANNOT_TELL, counted
from attnbench.report.html.cells import Cells, framework_of, short
from attnbench.report.html.families import Families, kind_words
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
    """The best of torch and the best of JAX on every shape that both ran in one run: in the run with the fastest."""
    best: dict[str, tuple[Ok, Ok]] = {}
    for group in cells.groups:
        torch, jax = (_fastest(group, name) for name in ("torch", "jax"))
        if torch is None or jax is None:
            continue
        known = best.get(torch.workload.id)
        if known is None or _product(torch, jax) <= _product(*known):
            best[torch.workload.id] = (torch, jax)
    return [_beside(torch, jax, cells.families) for torch, jax in best.values()]


def _fastest(group: Iterable[Row], framework: str) -> Ok | None:
    exact = (row.record for row in group if row.rank is not None)
    return next((r for r in exact if is_timed(r) and framework_of(r) == framework), None)


def _product(torch: Ok, jax: Ok) -> float:
    """Small where neither side lacks its fastest."""
    return _median(torch) * _median(jax)


def _median(record: Ok) -> float:
    assert record.time is not None
    return record.time.median_ns


def _beside(torch: Ok, jax: Ok, families: Families) -> dict[str, Any]:
    ratio = paired_ratio(torch, jax, RANK_LEVEL)
    return _shape(torch, families) | {
        "torch": label(torch),
        "torch_ns": _median(torch),
        "jax": label(jax),
        "jax_ns": _median(jax),
        "gain": ratio.value,
        "gain_low": ratio.low,
        "gain_high": ratio.high,
        "side": CANNOT_TELL if category(ratio) == CANNOT_TELL else SIDES[sign(ratio)],
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
    """What a cache of keys and values takes at each shape: of the shape alone, not of an implementation."""
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
    """Who launched what where; the page joins shapes that launched the same."""
    return [
        {"label": label(record), "framework": framework_of(record)}
        | _shape(record, cells.families)
        | {"kernels": "\n".join(_capped([*map(short, record.kernels)], MOST_KERNELS))}
        for record in cells.records
        if isinstance(record, Ok) and record.kernels
    ]


def why_nothing(records: Iterable[Record]) -> str:
    """The reasons that most cells without a result have."""
    reasons = Counter(record.reason for record in records if not isinstance(record, Ok))
    told = [
        f"{' '.join(reason.split())[:SHORT_REASON].rstrip('.')} ({counted(count, 'cell')})"
        for reason, count in reasons.most_common(MOST_REASONS)
    ]
    return "Nothing was timed." + (f" The reasons given most often: {'; '.join(told)}." if told else "")


def not_run(records: Iterable[Record], families: Families) -> Rows:
    """Everything without a result, once per reason."""
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
    for record in (row.record for group in cells.groups for row in group):
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
