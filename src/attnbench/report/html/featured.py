"""Which implementations a printed chart names: the best, and the plain ones; the others are grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

from attnbench.analyse.ranking import BASELINES

MOST_FEATURED = 6
GREY = "#d0d0d0"
Rows = Sequence[Mapping[str, Any]]


def featured(rows: Rows, most: int = MOST_FEATURED) -> list[str]:
    """At most so many labels of rows: plain ones, and of the others those that lose least time to the fastest.

    Of names of one kernel only the best: their lines would lie on each other. All of them where they are few.
    """
    labels = list(dict.fromkeys(row["label"] for row in rows))
    if len(labels) <= most:
        return labels
    losses = _losses(rows)
    plain = [name for name in BASELINES if name in labels]
    chosen = plain[:most]
    for name in sorted(set(labels) - set(plain), key=lambda name: (losses.get(name, float("inf")), name)):
        if len(chosen) < most and not any(_one_kernel(name, other, rows) for other in chosen):
            chosen.append(name)
    return [name for name in labels if name in chosen]


def _losses(rows: Rows) -> dict[str, float]:
    """Label -> mean logarithm of its time over the best of its shape; who ran on few of the shapes is last."""
    timed = [row for row in rows if row.get("ns") is not None and row.get("exact")]
    best: dict[str, float] = {}
    for row in timed:
        best[row["workload"]] = min(row["ns"], best.get(row["workload"], row["ns"]))
    found: dict[str, list[float]] = {}
    for row in timed:
        found.setdefault(row["label"], []).append(log(row["ns"] / best[row["workload"]]))
    return {name: sum(logs) / len(logs) + (len(logs) <= len(best) / 2) for name, logs in found.items()}


def _one_kernel(a: str, b: str, rows: Rows) -> bool:
    """Whether both ran the same kernels on every shape that both ran."""
    ran = [{row["workload"]: row.get("kernel") for row in rows if row["label"] == name} for name in (a, b)]
    both = ran[0].keys() & ran[1].keys()
    return bool(both) and all(ran[0][key] is not None and ran[0][key] == ran[1][key] for key in both)
