"""Regret: what choices lose against the fastest, over several shapes."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

from msgspec import Struct


class Regret(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Time of the choice / time of the fastest, over several shapes."""

    mean: float
    """Geometric mean."""
    worst: float
    worst_at: str
    shapes: int
    missed: int = 0
    """Number of further shapes whose regret is not known."""


def pooled(parts: Iterable[Regret | None]) -> Regret | None:
    """Return the regret over the shapes of all parts that are known; None without any."""
    each = [one for one in parts if one is not None]
    if not each:
        return None
    count = sum(one.shapes for one in each)
    worst = max(each, key=lambda one: one.worst)
    mean = exp(sum(log(one.mean) * one.shapes for one in each) / count)
    missed = sum(one.missed for one in each)
    return Regret(mean=mean, worst=worst.worst, worst_at=worst.worst_at, shapes=count, missed=missed)
