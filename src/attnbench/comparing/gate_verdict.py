"""Cases and controls -> what the gate says about all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from attnbench.comparing.gate_case import is_heavier
from attnbench.comparison import ALPHA, FAILING, OPEN, Case, Comparison, Control, Outcome
from attnbench.results.ratios import Ratio, geometric_mean

OnInconclusive = Literal["inconclusive", "pass", "fail"]
"""What inconclusive cases make of a job in which nothing fails."""

SILENT_CONTROLS = (
    "no control gave an answer, so nothing shows what would have been found: raise --budget, or quieten the machine"
)


class Judgement(Struct, frozen=True, kw_only=True):
    """The gate's answer, and what should be known about it."""

    outcome: Outcome
    warnings: tuple[str, ...] = ()


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p-value adjusted for being one of many (Holm's step-down), in the order given."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - place) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def p_slower(comparison: Comparison) -> float:
    """Probability of such data on any of the metrics were b not slower (Bonferroni over metrics)."""
    found = comparison.estimates.values()
    return min([1.0, *(len(found) * one.p_slower for one in found)])


def confirm(cases: Sequence[Case]) -> list[Case]:
    """Holm's correction over the second stage of all cases that had one."""
    return with_holm(cases, {place: p_slower(one.second) for place, one in enumerate(cases) if one.second is not None})


def with_holm(cases: Sequence[Case], p_values: Mapping[int, float]) -> list[Case]:
    """Cases with the p-values at those places adjusted; a regression that chance explains becomes inconclusive."""
    judged = list(cases)
    for place, p in zip(p_values, holm(list(p_values.values()))):
        case = replace(judged[place], p_holm=p)
        if case.status == "regression" and p > ALPHA:
            doubt = f"may be chance over {_cases(len(p_values))} (p {p:.2g} after Holm)"
            status = "memory" if is_heavier(case) else "inconclusive"
            case = replace(case, status=status, reason=f"{case.reason}, but {doubt}")
        judged[place] = case
    return judged


def judge(
    cases: Sequence[Case], controls: Sequence[Control], on_inconclusive: OnInconclusive = "inconclusive"
) -> Judgement:
    """The outcome: wrong numbers and memory beat all, then a failed A/A control, then slowdowns, then what is open."""
    still_open = sum(case.status in OPEN for case in cases)
    timed = any(case.comparison is not None and case.comparison.verdict is not None for case in cases)
    outcome: Outcome = "pass"
    if any(case.status in ("wrong", "memory") for case in cases):
        outcome = "fail"  # neither depends on time
    elif any(control.name == "a/a" and not (control.passed or control.silent) for control in controls):
        outcome = "untrusted"
    elif any(case.status in FAILING for case in cases):
        outcome = "fail"
    elif not timed:
        outcome = "nothing"
    elif still_open or (controls and all(control.silent for control in controls)):
        outcome = on_inconclusive
    warnings = [*_control_warnings(controls), *_case_warnings(cases)]
    if still_open and on_inconclusive == "pass":
        warnings.append(f"{_cases(still_open)} inconclusive, counted as passed because that was asked for")
    return Judgement(outcome=outcome, warnings=tuple(warnings))


def geomean(cases: Sequence[Case]) -> tuple[float, float, float] | None:
    """Geometric mean of all timed cases' ratios, its low and its high at the confidence of the cases; None if none."""
    ratios = [
        Ratio(one.ratio, *one.interval)
        for one in (case.comparison for case in cases)
        if one is not None and one.verdict is not None and one.ratio is not None and one.interval is not None
    ]
    if not ratios:
        return None
    mean = geometric_mean(ratios)
    return mean.value, mean.low, mean.high


def _control_warnings(controls: Sequence[Control]) -> list[str]:
    told = {
        "a/a": "untrusted: the A/A control failed ({}), so no verdict of this job can be believed; run it again",
        "+5 %": "underpowered: the +5 % control was not found ({}), so passes may hide slowdowns of that size",
    }
    if controls and all(control.silent for control in controls):
        return [SILENT_CONTROLS]
    return [
        told[control.name].format(control.comparison.verdict or control.comparison.reason or "not measured")
        for control in controls
        if not control.passed and not (control.silent and control.name == "a/a")
    ]


def _case_warnings(cases: Sequence[Case]) -> list[str]:
    told = {
        "missing": "of the baseline missing in the current run",
        "no_baseline": "without a baseline: new since then, or never saved (`attnbench baseline save RUN`)",
        "not_measured": "not measured",
    }
    counts = {status: sum(case.status == status for case in cases) for status in told}
    return [f"{_cases(count)} {told[status]}" for status, count in counts.items() if count]


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"
