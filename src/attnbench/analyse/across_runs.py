"""Two runs of one workload did not take turns: what each timed is held against what both timed."""

from __future__ import annotations

from collections.abc import Mapping

CLEARLY = 1.1
"""Ratios of one pair in two runs differ by less."""


def clearly_ahead(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    """Whether the fastest of one run beats the fastest of another; times by name."""
    shared = set(new) & set(old)
    if not shared:
        return False
    link = min(shared, key=lambda name: (new[name], name))
    return new[link] / min(new.values()) > CLEARLY * old[link] / min(old.values())
