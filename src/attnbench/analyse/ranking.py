"""Records of one workload -> rows in order of time, ranked apart only where the difference is certain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from msgspec import Struct

from attnbench.analyse.clocks import clock_of, comparable, on_one_clock, sitting_of
from attnbench.analyse.ratios import Ratio, paired_ratio
from attnbench.spec import Cell, Ok, Record

LEAST_DIFFERENCE = 1.01
"""Nothing closer than 1 % is ranked apart, however tight the interval."""
RANK_LEVEL = 0.99
"""Stricter than the 95 % that is printed: a table of ten asks nine questions."""
BASELINES = ("torch.eager", "jax.einsum", "numpy.float32")
ANCHOR = "anchor."
NOT_TIMED = "verified, not timed"
"""How the note begins of a record that may be checked but not timed (an interpreter, say)."""

OTHER_CLOCK, OTHER_SITTING = "timed by another clock", "timed in another sitting"
NOT_COMPARED = (OTHER_CLOCK, OTHER_SITTING)


class Row(Struct, frozen=True, kw_only=True):
    """One line of a ranking. `rank` is None for what is not ranked: `reason` says why."""

    implementation: str
    record: Record
    rank: int | None = None
    tied: bool = False
    """Shares its rank with the row above: it, or a row below that is certainly no slower, cannot be told from all of
    that rank."""
    behind: bool = False
    """Certainly slower than the first row of its rank, which it shares only through another."""
    speedup: Ratio | None = None
    """Time of the baseline / time of this one."""
    reason: str = ""


def label(record: Record | Cell) -> str:
    """Name in tables: the implementation, and the tunables where they are not the default."""
    config = ",".join(f"{k}={v}" for k, v in sorted(record.config.items()))
    return f"{record.implementation}[{config}]" if config else record.implementation


def is_timed(record: Record) -> TypeGuard[Ok]:
    """Whether the record has a speed."""
    return isinstance(record, Ok) and record.time is not None


def sign(ratio: Ratio) -> int:
    """Of time of b / time of a: +1 where a is faster for certain, -1 where b is, 0 where neither can be told."""
    return int(ratio.low > LEAST_DIFFERENCE) - int(ratio.high < 1 / LEAST_DIFFERENCE)


def by_workload(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Workload id -> its records, in the order they were made, without the anchors."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if not record.implementation.startswith(ANCHOR):
            groups.setdefault(record.workload.id, []).append(record)
    return groups


def baseline(records: Sequence[Record], against: Sequence[str] = ()) -> str | None:
    """Name of what the rest is compared with: the one named by `against`, else the plain one of the first framework."""
    timed = {r.implementation for r in records if is_timed(r) and not r.approximate}
    timed = {name for name in timed if not name.startswith(ANCHOR)}
    named = {name for name in timed if any(matches(name, one) for one in against)}
    choices = named or timed
    if len(choices) == 1 and named:
        return choices.pop()
    return next((name for name in BASELINES if name in choices), min(choices, default=None))


def of_step(records: Sequence[Record], step: str) -> list[Record]:
    """Those of one step: nobody computes two, so each has a baseline of its own."""
    return [record for record in records if record.workload.step == step]


def labelled(base: str | None, records: Sequence[Record]) -> str | None:
    """The baseline as tables call it: the plain one, or, where only some under tunables were timed, their first."""
    labels = [label(record) for record in records if is_timed(record) and record.implementation == base]
    return base if base in labels else next(iter(labels), base)


def matches(name: str, wanted: str) -> bool:
    """Whether an implementation is the one named, or one of the framework or family named."""
    return name == wanted or name.startswith((f"{wanted}.", f"{wanted}-"))


def rank(records: Iterable[Record], base: str | None = None) -> list[Row]:
    """Rows of one workload: exact and timed ones by time, then approximate ones, then the rest with their reasons."""
    shown = on_one_clock(r for r in records if not r.implementation.startswith(ANCHOR))
    timed = sorted((r for r in comparable(shown) if is_timed(r)), key=_order)
    clock, sitting = (clock_of(timed[0]), sitting_of(timed[0])) if timed else ("", "")
    named = [r for r in timed if label(r) == base] or [r for r in timed if r.implementation == base]
    reference = next(iter(named), None)
    rows = _ranked([r for r in timed if not r.approximate], reference)
    for record in timed:
        if record.approximate:
            rows.append(_row(record, reference, reason="approximate: not ranked among exact ones"))
    for record in shown:
        if is_timed(record) and clock_of(record) != clock:
            reason = f"{OTHER_CLOCK} ({clock_of(record)}; the others by {clock}): not compared"
            rows.append(Row(implementation=label(record), record=record, reason=reason))
        elif is_timed(record) and sitting_of(record) != sitting:
            reason = f"{OTHER_SITTING}, so that it took no turns with the others: not compared"
            rows.append(Row(implementation=label(record), record=record, reason=reason))
    for record in shown:
        if not is_timed(record):
            rows.append(Row(implementation=label(record), record=record, reason=_why_no_time(record)))
    return rows


def _why_no_time(record: Record) -> str:
    if not isinstance(record, Ok):
        return record.reason
    return next((note for note in record.notes if note.startswith(NOT_TIMED)), NOT_TIMED)


def _ranked(timed: Sequence[Ok], reference: Ok | None) -> list[Row]:
    """A new rank opens with a row that is certainly slower than every row of the rank before, and than none after it.

    Being too close to tell is not transitive: a ~ b and b ~ c with a certainly ahead of c. All three share a rank then,
    since any line between them would part two that nobody can tell apart; c is marked as `behind`. Where a machine
    drifts, medians and rounds may contradict each other: no line is drawn above what a later row certainly beats.
    """
    rows: list[Row] = []
    peers: list[Ok] = []
    for position, record in enumerate(timed, start=1):
        tied = bool(peers) and not _opens(record, peers, timed[position:])
        behind = tied and _is_slower(record, peers[0])
        peers = [*peers, record] if tied else [record]
        place = position + 1 - len(peers)
        rows.append(_row(record, reference, rank=place, tied=tied, behind=behind))
    return rows


def _opens(record: Ok, peers: Sequence[Ok], later: Sequence[Ok]) -> bool:
    behind_all = all(_is_slower(record, peer) for peer in reversed(peers))
    return behind_all and not any(_is_slower(record, one) for one in later)


def _is_slower(record: Ok, than: Ok) -> bool:
    return sign(paired_ratio(than, record, RANK_LEVEL)) > 0


def _row(record: Ok, reference: Ok | None, **fields: Any) -> Row:
    speedup = None if reference is None else paired_ratio(record, reference)
    return Row(implementation=label(record), record=record, speedup=speedup, **fields)


def _order(record: Ok) -> tuple[float, str]:
    """By median; equal ones by name, so that the order of the records decides nothing."""
    assert record.time is not None
    return record.time.median_ns, label(record)
