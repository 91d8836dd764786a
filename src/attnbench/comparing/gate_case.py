"""Two stages of one comparison -> what the case comes to: numbers first, then memory, then time."""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.comparing.statistics import CONTRADICTION
from attnbench.comparison import Case, CaseStatus, Comparison
from attnbench.spec import Failed, Incorrect, Ok, OutOfMemory, Record, Timeout, Workload

MOST_MEMORY = 1.01
LEAST_BYTES = 64 * 1024
"""Allocators round: fewer bytes more are no growth, whatever share they are."""
TOO_WIDE = "the stored times vary too much to tell anything: measure both again with more --budget, or compare refs"


def case_of(
    implementation: str, workload: Workload, first: Comparison | None, second: Comparison | None = None
) -> Case:
    """What both stages come to for one case; `gate.confirm` has the last word on regressions."""
    stages = [stage for stage in (first, second) if stage is not None]
    status, reason = _by_numbers(stages) or _by_time(first, second)
    if status not in ("wrong", "regression") and stages and all(grew(stage) for stage in stages):
        a, b = _peaks(stages[-1])
        status, reason = "memory", f"peak memory grew from {a:,} to {b:,} bytes" + (f"; {reason}" if reason else "")
    return Case(
        implementation=implementation,
        workload=workload,
        status=status,
        reason=reason,
        first=first,
        second=second,
        memory=_peaks(stages[-1]) if stages else (None, None),
    )


def is_heavier(case: Case) -> bool:
    """Whether every stage of a case found a higher peak."""
    stages = [stage for stage in (case.first, case.second) if stage is not None]
    return bool(stages) and all(grew(stage) for stage in stages)


def _by_numbers(stages: Sequence[Comparison]) -> tuple[CaseStatus, str] | None:
    """Status by whether the arms gave right numbers at all; None when times may decide."""
    for stage in stages:
        if isinstance(stage.record_b, Incorrect):
            return "wrong", _why(stage.record_b)  # whatever the baseline is: wrong, lost, or one that refuses the case
        if isinstance(stage.record_a, Ok) and stage.record_b is not None and not isinstance(stage.record_b, Ok):
            return "wrong", _why(stage.record_b)
    a, b = (stages[0].record_a, stages[0].record_b) if stages else (None, None)
    if a is None or isinstance(a, Ok):
        return None
    if isinstance(a, Failed | Timeout | OutOfMemory):
        # Nobody refused: the baseline was lost, and with it what the current one should be compared with.
        if b is not None and (b.status, b.reason) == (a.status, a.reason) and not stages[0].died:
            return "not_measured", f"neither gives an answer: {_why(a)}"
        return "inconclusive", f"the baseline was lost: {_why(a)}"
    if isinstance(b, Ok):
        return "no_baseline", f"the baseline: {_why(a)}"
    return "not_measured", _why(a)


def _why(record: Record) -> str:
    return f"{record.status.replace('_', ' ')}: {record.reason}"


def _by_time(first: Comparison | None, second: Comparison | None) -> tuple[CaseStatus, str]:
    if first is None or first.verdict is None:
        return "not_measured", (first.reason if first else "") or "not measured"
    if first.verdict != "slower":
        statuses: dict[str, CaseStatus] = {"faster": "improved", "same": "pass", "inconclusive": "inconclusive"}
        return statuses[first.verdict], _open_reason(first)
    once = f"slower once ({_how_much(first)})"
    if second is None or second.verdict is None:
        return "inconclusive", f"{once}, not measured on fresh launches"
    if second.verdict == "slower":
        return "regression", f"slower twice ({_how_much(first)}, then {_how_much(second)} on fresh launches)"
    if second.verdict == "inconclusive":
        return "inconclusive", f"{once}, inconclusive on fresh launches"
    return "pass", f"{once}, not confirmed on fresh launches"


def _open_reason(comparison: Comparison) -> str:
    seen = comparison.smallest_slowdown
    if comparison.verdict != "inconclusive" or seen is None:
        return comparison.reason
    count = len(comparison.launches)
    if contradiction := next((note for note in comparison.notes if note.startswith(CONTRADICTION)), ""):
        return f"{contradiction} ({_by_metric(comparison)})"
    parts = [f"after {count} launch{'' if count == 1 else 'es'}"] if count else []
    if comparison.reason:
        parts.append(comparison.reason)
    elif seen <= 1:
        parts.append(f"could have seen {seen:.1%}")
    else:
        parts.append("too few to tell anything, raise --budget" if count else TOO_WIDE)
    return ": ".join(parts)


def _by_metric(comparison: Comparison) -> str:
    return ", ".join(f"{one.metric} {one.ratio:.3f}" for one in comparison.estimates.values())


def _how_much(comparison: Comparison) -> str:
    """The ratio that made it slower; its metric is named where that is not the published one."""
    worst = min(comparison.estimates.values(), key=lambda one: one.p_slower, default=None)
    if worst is None or worst.ratio == comparison.ratio:
        return "?" if comparison.ratio is None else f"{comparison.ratio:.2f}"
    return f"{worst.ratio:.2f} by {worst.metric} time"


def _peaks(comparison: Comparison) -> tuple[int | None, int | None]:
    a, b = (
        record.memory.peak_bytes if isinstance(record, Ok) else None
        for record in (comparison.record_a, comparison.record_b)
    )
    return a, b


def grew(comparison: Comparison) -> bool:
    """Whether b's peak is over 1 % (and 64 kB) above a's."""
    a, b = _peaks(comparison)
    return a is not None and b is not None and b > MOST_MEMORY * a and b - a > LEAST_BYTES
