"""Policies made by hand, for the tests of everything that reads one."""

from __future__ import annotations

from typing import Any

from record_factory import CPU, workload

from attnbench.policy import Alternative, Barred, Choice, Entry, Place, Policy, place_of, shape_of
from attnbench.spec import Environment


def entry(name: str, q_len: int = 1024, **shape: Any) -> Entry:
    """What is chosen at a shape of the record factory."""
    on = workload(q_len, **shape)
    return Entry(at=shape_of(on), use=Choice(implementation=name, candidates=2, measured=on.id))


def place(*entries: Entry, at: Environment = CPU, **fields: Any) -> Place:
    made = place_of(at)
    values = {name: getattr(made, name) for name in made.__struct_fields__}
    return Place(**(values | {"entries": entries, "made": "2026-01-01T00:00:00+00:00", "runs": ("a.jsonl",)} | fields))


def policy(*entries: Entry, at: Environment = CPU, **fields: Any) -> Policy:
    return Policy(places=(place(*entries, at=at, **fields),))


def barred(q_len: int = 1024, incorrect: tuple[str, ...] = (), kept_out: tuple[str, ...] = (), **shape: Any) -> Barred:
    """Who may not be chosen at a shape of the record factory."""
    on = workload(q_len, **shape)
    return Barred(at=shape_of(on), measured=on.id, incorrect=incorrect, kept_out=kept_out)


def rival(name: str, ratio: float) -> Alternative:
    return Alternative(implementation=name, ratio=ratio)
